"""A saved model opened to evaluate or predict with: its task, its labels, its tokenizer, a batch that fits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vramfit.errors import CheckpointError, NoPlanFits, WorkloadError
from vramfit.loader.budget import free_bytes
from vramfit.loader.load import load_request
from vramfit.loader.request import make_request
from vramfit.models.anatomy import max_positions
from vramfit.models.resolve import resolve
from vramfit.models.tasks import AUTO_CLASSES, supported_tasks
from vramfit.runtime.budget import enforce, use_expandable_segments
from vramfit.runtime.data.samples import Samples, read_samples
from vramfit.runtime.data.source import DataSource
from vramfit.runtime.data.tokenizers import load_tokenizer
from vramfit.runtime.inference import Inference
from vramfit.runtime.training.place import Place
from vramfit.runtime.training.preparation import HEADS_BY_LABELS, LONGEST, STRIDE, gpu_here
from vramfit.units import parse_bytes
from vramfit.workload import TRAINED_TASKS, Precision, Task

MAX_BATCH = 256
"""Beyond so many samples of full length nothing is gained."""
WITHOUT_BUDGET = 32
"""Samples of full length on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """A model's folder, understood; its weights are loaded when the data is known to be good."""

    model: str
    task: Task
    label_names: tuple[str, ...]
    tokenizer: Any
    max_length: int
    trust_remote_code: bool

    def read(self, source: DataSource) -> Samples:
        """The samples of a file, as this model sees them.

        Raises:
            DataError: rows, columns or files that cannot be used.
        """
        return read_samples(
            source,
            self.tokenizer,
            max_length=self.max_length,
            label_names=self.label_names or None,
            stride=min(STRIDE, self.max_length // 4),
        )

    def load(
        self,
        place: Place,
        samples: Samples,
        *,
        memory: str | int | None = None,
        gpu: str | None = None,
        batch: int | None = None,
        precision: Precision = "fp32",
        progress: Callable[[int, int], None] | None = None,
    ) -> Inference:
        """The model on its device, with a batch that fits beside it.

        Raises:
            NoPlanFits: not even one sample of this length fits.
            CheckpointError: weights that are damaged, or that lack the head.
        """
        longest = max(samples.lengths)
        budget_bytes = parse_bytes(memory, name="memory") if memory is not None else free_bytes(place.device)
        if batch is None:
            batch = self._fitting(place, longest, budget_bytes, gpu, precision)
        if memory is not None:
            use_expandable_segments(place.device)
            enforce(memory, place.device)
        request = make_request(
            self.model,
            task=self.task,
            precision=precision,
            memory=budget_bytes if place.has_budget else None,
            device=str(place.device),
            trust_remote_code=self.trust_remote_code,
        )
        model, report = load_request(request, progress=progress)
        if report.fresh:
            raise CheckpointError(
                f"{self.model} has no trained head for {self.task}: {report.fresh[0]} is not in it",
                file=self.model,
                tensor=report.fresh[0],
                hint="fine-tune it first: vramfit train",
            )
        return Inference(model, place, max_tokens=batch * longest, precision=precision)

    def _fitting(
        self, place: Place, longest: int, budget_bytes: int | None, gpu: str | None, precision: Precision
    ) -> int:
        """Samples of full length that fit, as predicted."""
        if not place.has_budget:
            return WITHOUT_BUDGET
        from vramfit.estimator.search import max_batch

        found = max_batch(
            self.model,
            task=self.task,
            mode="infer",
            seq=longest,
            precision=precision,
            memory=budget_bytes,
            trust_remote_code=self.trust_remote_code,
            **({"gpu": gpu} if (gpu := gpu or gpu_here(place)) else {}),
        )
        if found.batch == 0:
            raise NoPlanFits(
                f"not even one sample of {longest} tokens fits: {found.limited_by}",
                best=found.estimate,
                budget_bytes=budget_bytes,
                hint="give more memory, cut the sequences (--seq), or take precision bf16",
            )
        return min(found.batch, MAX_BATCH)


def open_model(
    model: str,
    *,
    task: str | None = None,
    seq: int | None = None,
    trust_remote_code: bool = False,
    or_features: bool = False,
) -> TrainedModel:
    """What a model's folder says of itself.

    Args:
        task: None takes the head that the configuration names.
        seq: cut sequences at so many tokens; None takes what the model allows.
        or_features: an encoder without a head is welcome too, as task features.

    Raises:
        UnknownModel, CheckpointError: no model there, or no tokenizer.
        WorkloadError: an encoder without a head, or a task that cannot be evaluated.
    """
    config = resolve(model, task=task or "features", trust_remote_code=trust_remote_code).config
    found = task or _task_of(config) or ("features" if or_features else None)
    if found not in TRAINED_TASKS and not (or_features and found == "features"):
        raise WorkloadError(
            [f"{model} has {'no head' if found is None else f'task {found}'}: it cannot answer"],
            hint=f"fine-tune it first (vramfit train), or name the task: --task {', '.join(TRAINED_TASKS)}",
        )
    tokenizer = load_tokenizer(model)
    limits = [max_positions(config) or LONGEST, seq, getattr(tokenizer, "model_max_length", None)]
    names = tuple(str(config.id2label[i]) for i in range(config.num_labels)) if found in HEADS_BY_LABELS else ()
    kind: Any = found
    return TrainedModel(
        model=model,
        task=kind,
        label_names=names,
        tokenizer=tokenizer,
        max_length=int(min(n for n in limits if n)),
        trust_remote_code=trust_remote_code,
    )


def _task_of(config: Any) -> str | None:
    """The task whose class the configuration was saved with."""
    import transformers

    architectures = getattr(config, "architectures", None) or ()
    for task in supported_tasks(config):
        found = getattr(transformers, AUTO_CLASSES[task])._model_mapping.get(type(config), None)
        classes = found if isinstance(found, tuple | list) else (found,)
        if task in TRAINED_TASKS and any(c.__name__ in architectures for c in classes if c is not None):
            return task
    return None
