"""The model of a Trainer and its loss, found beneath what accelerate, peft and sentence-transformers put around them.

The head that follows an encoder of sentence-transformers has the modules of the SentenceTransformer in it, so what
learns is theirs. The encoder gives vectors of texts inside steps only; an evaluation and a save see the model as
sentence-transformers made it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from vramfit.errors import WorkloadError
from vramfit.models.configuration import task_of_class
from vramfit.monitor.places import first_line
from vramfit.runtime.model_state import untouched
from vramfit.step.own_loss import still
from vramfit.step.plain import Batch
from vramfit.step.recovery import RandomState, is_out_of_memory
from vramfit.tasks import find_task, task_names
from vramfit.tasks.base import IGNORED
from vramfit.tasks.embedding import MODES
from vramfit.tasks.parts.losses import head_loss, loss_of, model_inputs
from vramfit.tasks.parts.pooling import NAME, EmbeddingHead, attach

PACKAGE = "sentence_transformers"
LAYERS = ("Dense", "LayerNorm", "Normalize")
VECTOR = "sentence_embedding"
"""What its modules call the vector of a text."""
NAMES_OF_VECTOR = ("module_input_name", "module_output_name")
HIDDEN = ("last_hidden_state", ["last_hidden_state"], ("last_hidden_state",))
TOKENS = ("input_ids", "attention_mask", "token_type_ids")
"""Features of a text that become a batch."""
Origin = Literal["head", "smoother", "function", "texts", "own"]
MAX_DIFFERENCE = 1e-3
"""Of a head's loss against the mean that vramfit takes; half precision stays below."""

LossPair = tuple[Callable[[Any, Batch], torch.Tensor], Callable[[Batch], int]]


class Shared(torch.nn.Module):
    """A module of sentence-transformers that takes a vector of each text and gives another."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.module({VECTOR: vectors})[VECTOR]
        return made


def is_of_package(value: Any) -> bool:
    """Whether an object is of a class of sentence-transformers, or of one derived from such a class."""
    return any(kind.__module__.partition(".")[0] == PACKAGE for kind in type(value).__mro__)


def is_sentence_model(model: Any, kind: str = "SentenceTransformer") -> bool:
    """Whether it is a SentenceTransformer, or a model of another kind; a sparse encoder is none."""
    names = [kind.__name__ for kind in type(model).__mro__ if kind.__module__.partition(".")[0] == PACKAGE]
    return names[:1] == [kind]


def encoder_in(model: Any) -> Any:
    """The encoder of transformers inside a SentenceTransformer; any other model is given back."""
    if not is_sentence_model(model):
        return model
    from transformers import PreTrainedModel

    first = next(iter(model.children()), None)
    found = getattr(first, "model", None) or getattr(first, "auto_model", None)
    return found if isinstance(found, PreTrainedModel) else model


def read_head(model: Any) -> EmbeddingHead | str:
    """What makes vectors of texts out of the encoder's outputs; or why that is not known, in words."""
    if encoder_in(model) is model:
        return f"{type(model).__name__} has no encoder of transformers as its first module"
    first, *others = model.children()
    text = getattr(first, "modality_config", {}).get("text", {})
    if text.get("method", "forward") != "forward" or text.get("method_output_name", HIDDEN[0]) not in HIDDEN:
        return f"{type(first).__name__} pools something else than the encoder's last hidden states"
    if not others or type(others[0]).__name__ != "Pooling":
        return "no Pooling follows the encoder"
    mode = others[0].pooling_mode if hasattr(others[0], "pooling_mode") else others[0].get_pooling_mode_str()
    if mode not in MODES:
        return f"pooling {mode} is none of {', '.join(MODES)}"
    odd = [part for part in others[1:] if not _is_layer(part)]
    if odd:
        return f"the module {type(odd[0]).__name__} after pooling is none of {', '.join(LAYERS)}"
    layers = others[1:]
    normalizes = bool(layers) and type(layers[-1]).__name__ == "Normalize"
    inner = layers[:-1] if normalizes else layers
    return EmbeddingHead(MODES[mode], normalizes=normalizes, layers=[Shared(part) for part in inner])


def _is_layer(part: Any) -> bool:
    """Whether a module takes nothing but the vector of a text, and changes nothing else."""
    names = {getattr(part, name, VECTOR) for name in NAMES_OF_VECTOR}
    return is_of_package(part) and type(part).__name__ in LAYERS and names == {VECTOR}


@contextmanager
def giving_vectors(encoder: Any, head: EmbeddingHead) -> Iterator[None]:
    """Inside, an encoder gives vectors of texts."""
    hook = attach(encoder, head)
    try:
        yield
    finally:
        hook.remove()
        delattr(encoder, NAME)


def sentence_losses(trainer: Any) -> dict[str, Any]:
    """Losses by dataset, of a trainer of sentence-transformers with one for all under ""; empty for other trainers."""
    if not is_of_package(trainer):
        return {}
    loss = getattr(trainer, "loss", None)
    losses = loss if isinstance(loss, dict) else {"": loss}
    return {name: one for name, one in losses.items() if isinstance(one, torch.nn.Module)}


def bare_model(trainer: Any) -> Any:
    """The model of transformers, beneath what accelerate, peft or sentence-transformers put around it."""
    model = encoder_in(trainer.accelerator.unwrap_model(trainer.model))
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def step_model(trainer: Any) -> Any:
    """The model that the passes of a step go through: the encoder, where sentence-transformers has more around it."""
    return encoder_in(trainer.model)


def task_of(trainer: Any) -> str | None:
    """The task of the model's head; None for a head that transformers does not list."""
    from transformers import PreTrainedModel

    model = bare_model(trainer)
    if not isinstance(model, PreTrainedModel):
        return None
    kinds = [kind for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel)]
    for kind in kinds:
        task = task_of_class(kind, model.config, preferred="")
        if task in task_names() and find_task(task).has_head:
            return task
    return None


def is_overridden(trainer: Any, method: str) -> bool:
    """Whether a subclass, or the script itself, put something in the place of a method of Trainer."""
    from transformers import Trainer

    return method in vars(trainer) or getattr(type(trainer), method) is not getattr(Trainer, method)


def origin_of(trainer: Any) -> Origin:
    """Where the loss comes from."""
    if is_overridden(trainer, "compute_loss"):
        return "own"
    if trainer.compute_loss_func is not None:
        return "function"
    if trainer.label_smoother is not None:
        return "smoother"
    return "head" if task_of(trainer) is not None else "own"


def loss_pair(trainer: Any) -> LossPair | None:
    """The sum and the count of a Trainer's loss; None where the labels of the batch say all."""
    function, smoother = trainer.compute_loss_func, trainer.label_smoother
    if function is not None:
        return lambda output, batch: function(output, batch.get("labels"), num_items_in_batch=1), _num_labelled
    if smoother is not None:
        return lambda output, batch: smoother(output, batch["labels"], num_items_in_batch=1), _num_labelled
    return None


def _num_labelled(batch: Batch) -> int:
    """As the Trainer counts."""
    return int((batch["labels"] != IGNORED).sum())


def follows_count(trainer: Any, batch: Batch) -> bool:
    """Whether the loss of a Trainer is divided by the `num_items_in_batch` it is given.

    Raises:
        WorkloadError: the model cannot take the batch.
    """
    model = trainer.model
    with untouched(model), still(model), _refused(model, batch):
        counts = (torch.tensor(n) for n in (64, 128))
        once, twice = (float(trainer.compute_loss(model, dict(batch), num_items_in_batch=n)) for n in counts)
    return abs(once - twice) > MAX_DIFFERENCE * abs(once)


@contextmanager
def _refused(model: Any, batch: Batch) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        shapes = ", ".join(f"{name} of {' × '.join(map(str, value.shape))}" for name, value in batch.items())
        raise WorkloadError(
            [f"{type(model).__name__} cannot take samples of the train_dataset ({shapes}): {first_line(error)}"],
            hint="labels must be below num_labels, tokens below the size of the vocabulary, and samples no longer than "
            "the model's positions",
        ) from error


def own_loss(model: Any, batch: Batch) -> float:
    """What the model itself gives as its loss, nothing dropped.

    Raises:
        WorkloadError: it gives none, or cannot take the batch.
    """
    with untouched(model), still(model), _refused(model, batch):
        output = model(**batch)
    loss = loss_of(output)
    if loss is None:
        raise WorkloadError(
            [f"{type(model).__name__} gives no loss for samples of {', '.join(batch)}: they have no labels"],
            hint="give every sample `labels`, or start_positions and end_positions",
        )
    return float(loss)


def summed_loss(model: Any, batch: Batch) -> float:
    """The mean that vramfit makes of the same batch out of sums and counts."""
    loss = head_loss(model, batch)
    with untouched(model), still(model):
        sums = loss.sums(model(**model_inputs(batch)), batch)
    return sum(float(s) / n for s, n in zip(sums, loss.counts(batch), strict=True) if n)


@contextmanager
def drawn_again() -> Iterator[None]:
    """What is drawn at random inside is drawn again afterwards."""
    start = RandomState.now()
    try:
        yield
    finally:
        start.restore()
