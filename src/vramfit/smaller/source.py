"""The model that a smaller one is made of: opened, and on the host in fp32."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.models.hub import exported_file
from vramfit.models.resolve import resolve
from vramfit.runtime.device import RunDevice
from vramfit.runtime.trained import TrainedModel, open_model
from vramfit.runtime.training.saving import write_model
from vramfit.smaller.folder import check_output
from vramfit.smaller.rows import Rows
from vramfit.smaller.sizes import Sizes
from vramfit.tasks.parts import pooling


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A model as the user names it."""

    model: str
    task: str | None = None
    """None takes the head that the configuration names, and the encoder alone where it names none."""
    seq: int | None = None
    trust_remote_code: bool = False

    def open(self) -> TrainedModel:
        """What its folder says; weights are not read.

        Raises:
            UnknownModel, CheckpointError, WorkloadError: no model there, no tokenizer, or the head of another task.
        """
        if exported_file(self.model) is not None:
            raise WorkloadError([f"{self.model} is exported already"], hint="give the folder that it was exported from")
        return open_model(
            self.model, task=self.task, seq=self.seq, trust_remote_code=self.trust_remote_code, or_vectors=True
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """What is to be made smaller, by the rows of which files, and where to."""

    source: Source
    data: tuple[str, ...]
    output: Path
    text_columns: tuple[str, ...] = ()
    max_rows: int | None = None

    def open(self) -> tuple[TrainedModel, Rows]:
        """The model and its rows, once the output is known to be free.

        Raises:
            UnknownModel, CheckpointError, WorkloadError: as `Source.open`.
            VramfitError: the output is there already.
        """
        check_output(self.output)
        trained = self.source.open()
        return trained, Rows(files=self.data, task=trained.task, text_columns=self.text_columns, max_rows=self.max_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """What came of it."""

    model: str
    output: str
    num_rows: int
    """Rows that were read; `trim`: all of them have the same tokens as before."""
    max_difference: float
    """Between the answers of the folder and of the model that it was made of, with what was taken out masked."""
    before: Sizes
    after: Sizes


def load_whole(trained: TrainedModel) -> Any:
    """The model on the host, in fp32, to be evaluated.

    Raises:
        CheckpointError: weights that are damaged, or that lack the head.
        NoPlanFits: the host's memory does not hold it.
    """
    return trained.load_weights(trained.workload(), RunDevice("cpu"), None).eval()


def load_answering(trained: TrainedModel) -> Any:
    """The same, with the mean of tokens as its vector where an encoder has nothing that pools."""
    model = load_whole(trained)
    if trained.kind.gives_vectors and pooling.head_of(model) is None:
        pooling.attach(model, pooling.EmbeddingHead("mean", normalizes=False))
    return model


def saved_dtype(trained: TrainedModel) -> torch.dtype:
    """The type that the configuration says the weights were saved in; fp32 where it does not say."""
    found = resolve(trained.model, task=trained.task, trust_remote_code=trained.trust_remote_code).config
    name = str(getattr(found, "dtype", None)).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def write_as_saved(model: Any, trained: TrainedModel, folder: Path) -> None:
    """Write a model and its tokenizer into a folder, in the precision that the source was saved in."""
    if not trained.kind.pools_itself:
        model._modules.pop(pooling.NAME, None)  # `load_answering` has put it on
    write_model(model.to(saved_dtype(trained)), trained.tokenizer, folder, trained.max_length)
