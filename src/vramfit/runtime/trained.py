"""A saved model opened to evaluate or predict with: its task, its labels, its tokenizer, a batch that fits."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vramfit.devices.catalogue import find_gpu
from vramfit.errors import CheckpointError, NoPlanFits, WorkloadError
from vramfit.loader.budget import free_bytes
from vramfit.loader.load import load_request, make_request
from vramfit.loader.model import find_origin
from vramfit.models.anatomy import max_positions
from vramfit.models.build import build_for
from vramfit.models.configuration import supported_attention, supported_tasks
from vramfit.models.hub import exported_file
from vramfit.models.resolve import ResolvedModel, resolve
from vramfit.models.sentence_folder import NO_VECTORS, find_prompt, is_sentence_folder
from vramfit.models.tokenizers import load_tokenizer
from vramfit.records.codec import RecordError, from_json
from vramfit.records.run import RECORD, RunRecord
from vramfit.runtime.data.samples import LONGEST, STRIDE, Samples, read_ahead, read_samples
from vramfit.runtime.data.source import DataSource
from vramfit.runtime.device import RunDevice, enforce
from vramfit.runtime.inference import Inference
from vramfit.runtime.onnx_model import open_exported
from vramfit.runtime.training.checkpoints import not_a_model
from vramfit.settings import SETTINGS, having
from vramfit.settings.attention import PACKED
from vramfit.settings.fused import Fused
from vramfit.tasks import Task, encoder_alone, find_task, ranking_task, trained_tasks, vector_task
from vramfit.tasks.embedding import HeadParts
from vramfit.tasks.parts.heads import problem_of, thresholds_of
from vramfit.tasks.parts.pooling import head_of
from vramfit.tasks.parts.reading import Tokenizing, texts_of
from vramfit.techniques.application import can_fuse, prepare
from vramfit.techniques.packing.attention import FLASH_CAPABILITY, has_packed_kernel, takes_heads
from vramfit.workload import Workload

MAX_BATCH = 256
"""Beyond so many samples of full length nothing is gained."""
MAX_PACKED_TOKENS = 65_536
"""Of a packed row: products of so many rows are as fast as they get, and the host makes the next row meanwhile."""
WITHOUT_BUDGET = 32
"""Samples of full length on a CPU."""
Progress = Callable[[int, int], None]
"""Told of bytes read and bytes to read."""
INFER = {"mode": "infer"}
FINE_TUNE = "fine-tune it first: vramfit train"
FINE_TUNE_OR_VECTORS = f"fine-tune it first (vramfit train), or serve its vectors: --task {encoder_alone().name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """A model's folder, understood; its weights are loaded when the data is known to be good."""

    model: str
    task: str
    label_names: tuple[str, ...]
    tokenizer: Any
    max_length: int
    trust_remote_code: bool
    attentions: tuple[str, ...] = ()
    """The attention kernels that its family has."""
    names_head: bool = True
    """Whether the configuration names the head of the task."""
    learned_pairs: bool = False
    """Whether the record of its run says that texts came in pairs."""
    problem: str | None = None
    """What its head has learned, of a task whose head may learn several things."""
    thresholds: tuple[float, ...] = ()
    """The probability from which each label is given, where several may be."""
    parts: HeadParts | None = None
    """What its folder says of a head that pools."""
    prompt: str | None = None
    """What goes before every text; None takes what its folder says."""

    @property
    def kind(self) -> Task:
        """Its task."""
        return find_task(self.task)

    @property
    def tokenizing(self) -> Tokenizing:
        """How texts become tokens for it."""
        return Tokenizing(
            tokenizer=self.tokenizer,
            max_length=self.max_length,
            label_names=self.label_names,
            stride=min(STRIDE, self.max_length // 4),
            problem=self.problem,
            thresholds=self.thresholds,
            prompt=find_prompt(self.parts, self.prompt),
        )

    def check_head(self) -> None:
        """Look for a head that the configuration does not name, before data is read by labels that mean nothing.

        Raises:
            CheckpointError: it is not in the checkpoint.
        """
        if self.names_head or not self.kind.has_head:
            return
        request = make_request(self.model, task=self.task, device="cpu", trust_remote_code=self.trust_remote_code)
        inspection = find_origin(request, request.resolve()).inspection
        refuse_fresh(self.model, self.task, inspection.fresh if inspection is not None else (), hint=FINE_TUNE)

    def read(self, source: DataSource) -> Samples:
        """The samples of a file, as this model sees them.

        Raises:
            DataError: rows, columns or files that cannot be used.
        """
        return read_samples(replace(source, of_model=True, problem=self.problem), self.tokenizing)

    def read_ahead(self, source: DataSource) -> Iterator[Samples]:
        """The samples of a file in parts, each tokenized while the one before it is in use; windows come as one.

        Raises:
            DataError: rows, columns or files that cannot be used.
        """
        if self.kind.reads_windows:
            return iter([self.read(source)])
        return read_ahead(replace(source, of_model=True, problem=self.problem), self.tokenizing)

    def notes_on(self, samples: Samples) -> tuple[str, ...]:
        """What to know of samples beside this model: single texts, where it learned from pairs; and of their labels."""
        if not self.learned_pairs or len(texts_of(samples.references[0])) > 1:
            return samples.notes
        single = "the model learned from pairs of texts, and rows here have one; name both: --text-column FIRST,SECOND"
        return (single, *samples.notes)

    def suited(self, run_device: RunDevice, **settings: Any) -> dict[str, Any]:
        """Settings for `load`, with the attention to take: packed where its kernel is, unless another was asked for.

        Args:
            settings: of the workload; `gpu` is the one that a batch is to be chosen for, where it is another one.

        Raises:
            WorkloadError: no such settings, or packed for a task whose outputs are not laid out again, or fused where
                batches are not packed or layers not known.
            UnknownGPU: no such GPU in the catalogue.
        """
        fused = settings.pop(Fused.keyword, False)
        w, why_not = self.workload(**settings), self.kind.why_not_unpacked
        if w.is_packed and why_not is not None:
            raise WorkloadError([f"attention packed: {self.task} {why_not}; take sdpa"])
        pays = w.has_own_attention and "packed" in self.attentions and why_not is None
        pays = pays and (w.gpu is None or find_gpu(w.gpu).compute_capability >= FLASH_CAPABILITY)
        if not ((pays or w.is_packed) and has_packed_kernel(run_device.device, w)):
            if fused:
                raise WorkloadError(
                    ["fused is for packed batches on a GPU, and these are not packed"], hint="leave out fused"
                )
            return settings
        if not fused:
            return settings | PACKED
        w = self.workload(**settings | PACKED | {Fused.keyword: True})
        model = build_for(_resolve(self.model, self.task, self.trust_remote_code), w)
        return settings | PACKED | {Fused.keyword: can_fuse(model, w, run_device.device)}

    def workload(self, **settings: Any) -> Workload:
        """Inference with this model, at its full length unless `seq` says otherwise.

        Raises:
            WorkloadError: settings that contradict each other.
        """
        return Workload.from_keywords(
            **{"model": self.model, "task": self.task, "seq": self.max_length} | settings | INFER
        )

    def load(
        self,
        run_device: RunDevice,
        samples: Samples | None = None,
        *,
        batch: int | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> Inference:
        """The model on its device, with a batch that fits beside it.

        Args:
            samples: what is to go through; None where only the model says how long they may be.
            batch: samples of full length; None takes what fits.
            settings: of the workload: `memory` (what PyTorch may reserve), `gpu` (choose the batch for this one; None
                takes the one that is there), `precision` and others, as `suited` gives them.

        Raises:
            NoPlanFits: not even one sample of this length fits.
            CheckpointError: weights that are damaged, or that lack the head.
        """
        longest = self.max_length if samples is None else max(samples.lengths)
        w = self.workload(seq=longest, **settings)
        budget_bytes = w.memory if w.memory is not None else free_bytes(run_device.device)
        if batch is None:
            batch = self._fitting(run_device, w, budget_bytes)
        if w.memory is not None:
            enforce(w.memory, run_device.device)
        model = self.load_weights(w, run_device, budget_bytes, progress=progress)
        self.cut_vectors(model)
        return Inference(model, run_device, max_tokens=batch * longest, workload=w)

    def cut_vectors(self, model: torch.nn.Module) -> None:
        """Have a model give vectors of the length that its folder says."""
        head = head_of(model)
        if head is not None and self.parts is not None:
            head.dims = self.parts.dims

    def load_weights(
        self,
        workload: Workload,
        run_device: RunDevice,
        memory: int | None,
        *,
        hint: str = FINE_TUNE,
        progress: Progress | None = None,
    ) -> torch.nn.Module:
        """The model on its device, prepared as a workload says.

        Args:
            memory: what weights may take, on a device that has a budget.
            hint: what to do about a head that is not in the checkpoint.

        Raises:
            CheckpointError: weights that are damaged, or that lack the head.
        """
        exported = exported_file(self.model)
        if exported is not None:
            return open_exported(exported, self.model, workload, run_device)
        asked = {name: getattr(workload, name) for name in having(at_load=True) if name != "model"}
        asked["memory"] = memory if run_device.has_budget else None
        request = make_request(
            self.model, device=str(run_device.device), trust_remote_code=self.trust_remote_code, **asked
        )
        model, report = load_request(request, progress=progress)
        if self.kind.has_head:
            refuse_fresh(self.model, self.task, report.fresh, hint=hint)
        # types, quantized weights and layers in host memory are as the loader has made them
        loaded = {name: SETTINGS[name].default for name in having(of_weights=True)}
        return prepare(model, replace(workload, **loaded))

    def _fitting(self, run_device: RunDevice, workload: Workload, budget_bytes: int | None) -> int:
        """Samples of full length that fit, as predicted."""
        if not run_device.has_budget:
            return WITHOUT_BUDGET
        from vramfit.estimator.search import max_batch

        w = replace(workload, memory=budget_bytes, gpu=workload.gpu or run_device.gpu)
        asked = {name: getattr(w, name) for name in having(in_inference=True) if name != "model"}
        found = max_batch(self.model, trust_remote_code=self.trust_remote_code, **asked)
        if found.batch == 0:
            raise NoPlanFits(
                f"not even one sample of {w.seq} tokens fits: {found.limited_by}",
                best=found.estimate,
                budget_bytes=budget_bytes,
                hint="give more memory, cut the sequences (--seq), or take precision bf16",
            )
        most = max(MAX_PACKED_TOKENS // w.seq, 1) if w.is_packed else MAX_BATCH
        return min(found.batch, most)


def open_model(
    model: str,
    *,
    task: str | None = None,
    seq: int | None = None,
    trust_remote_code: bool = False,
    or_vectors: bool = False,
) -> TrainedModel:
    """What a model's folder says of itself.

    Args:
        task: None takes the head that the configuration names.
        seq: cut sequences at so many tokens; None takes what the model allows.
        or_vectors: an encoder without a head is welcome too, for its vectors.

    Raises:
        UnknownModel, CheckpointError: no model there, no tokenizer, or the head of another task.
        WorkloadError: an encoder without a head, or a task that cannot be evaluated.
    """
    resolved = _resolve(model, task or encoder_alone().name, trust_remote_code)
    config = resolved.config
    named = tasks_of(config)
    found = task or _pooled(model) or next(iter(named), None) or (encoder_alone().name if or_vectors else None)
    kind = None if found is None else find_task(found)
    if kind is None or not (kind.is_trained or (or_vectors and kind.is_served)):
        raise WorkloadError(
            [f"{model} has {'no head' if found is None else f'task {found}'}: it cannot answer"],
            hint=f"fine-tune it first (vramfit train), or name the task: --task {', '.join(trained_tasks())}",
        )
    other = next((name for name in named if find_task(name).shares_head_names), None)
    if other is not None and kind.is_trained and kind.has_head and kind.name not in named:
        raise CheckpointError(
            f"{model} has no trained head for {kind.name}: it was saved as {', '.join(config.architectures)}",
            file=model,
            hint=f"leave --task out: its head is for {other}",
        )
    if kind.pools_itself and ranking_task().name in named and config.num_labels == 1 and not _pooled(model):
        raise CheckpointError(
            f"{model} is a reranker ({', '.join(config.architectures)} with one score): it scores pairs of texts, and "
            "gives no vectors",
            file=model,
            hint=f"{NO_VECTORS}; --task {encoder_alone().name} gives the mean of its tokens all the same",
        )
    tokenizer = load_tokenizer(model, config)
    if kind.pools_itself and resolved.task != kind.name:
        resolved = _resolve(model, kind.name, trust_remote_code)
    limits = [max_positions(config) or LONGEST, seq or resolved.max_length]
    limits += [getattr(tokenizer, "model_max_length", None)]
    names = tuple(str(config.id2label[i]) for i in range(config.num_labels)) if kind.has_classes else ()
    return TrainedModel(
        model=model,
        task=kind.name,
        label_names=names,
        tokenizer=tokenizer,
        max_length=int(min(n for n in limits if n)),
        trust_remote_code=trust_remote_code,
        attentions=tuple(a for a in supported_attention(config) if a != "packed" or takes_heads(config)),
        names_head=kind.name in named or not kind.has_head,
        learned_pairs=resolved.folder is not None and _learned_pairs(resolved.folder / RECORD),
        problem=problem_of(config.to_dict()) if kind.has_problems else None,
        thresholds=thresholds_of(config.to_dict()) if kind.has_problems else (),
        parts=resolved.parts,
    )


def _resolve(model: str, task: str, trust_remote_code: bool) -> ResolvedModel:
    try:
        return resolve(model, task=task, trust_remote_code=trust_remote_code)
    except CheckpointError:
        reason = None
        with suppress(OSError):
            reason = not_a_model(Path(model).expanduser())
        if reason is None:
            raise
        raise reason from None


def _pooled(model: str) -> str | None:
    """The task that pools, where a model is a folder that says how."""
    folder = Path(model).expanduser()
    if not folder.is_dir() or not is_sentence_folder(folder):
        return None
    return vector_task().name


def _learned_pairs(record: Path) -> bool:
    """Whether a run's record says so; a model need not have one."""
    try:
        return from_json(RunRecord, record.read_text(encoding="utf-8")).num_texts > 1
    except (OSError, UnicodeDecodeError, RecordError):
        return False


def refuse_fresh(model: str, task: str, fresh: Sequence[str], *, hint: str) -> None:
    """Raises CheckpointError where weights of a task's head are not in the checkpoint."""
    if fresh:
        raise CheckpointError(
            f"{model} has no trained head for {task}: {fresh[0]} is not in it", file=model, tensor=fresh[0], hint=hint
        )


def tasks_of(config: Any) -> tuple[str, ...]:
    """The tasks whose class the configuration was saved with."""
    import transformers

    architectures = getattr(config, "architectures", None) or ()
    tasks = []
    for task in supported_tasks(config):
        found = getattr(transformers, find_task(task).auto_class)._model_mapping.get(type(config), None)
        classes = found if isinstance(found, tuple | list) else (found,)
        kind = find_task(task)
        if kind.is_trained and kind.has_head and any(c.__name__ in architectures for c in classes if c is not None):
            tasks.append(task)
    return tuple([task for task in tasks if find_task(task).recognises(config)] or tasks)
