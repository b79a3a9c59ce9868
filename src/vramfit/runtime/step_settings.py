"""`StepSettings`: what a `Stepper` is told, and the checks before the first step.

The checks also find modules and losses whose result depends on how a batch is split.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from vramfit.errors import WorkloadError, nearest_names
from vramfit.monitor.places import warn_user
from vramfit.records.plan import Plan
from vramfit.settings import LIVE, PLANNED, SETTINGS, asked_of
from vramfit.settings.attention import Attention
from vramfit.settings.offload import Offload
from vramfit.step.plain import Batch, bring, each_tensor
from vramfit.step.splitting import Rows, width_of
from vramfit.tasks.base import PER_TOKEN
from vramfit.tasks.parts.joint import PLACES
from vramfit.techniques import offloading, packing
from vramfit.techniques.offloading.layer_inputs import layer_inputs_of
from vramfit.units import parse_bytes, plain
from vramfit.workload import Workload, settings_of

IN_BATCH = ("contrastive", "infonce", "multiplenegatives", "ntxent", "gistembed", "tripletsemihard", "supcon", "clip")
"""Losses that compare the samples of a batch with each other, by parts of their names."""
REHEARSED_MICRO_BATCHES = 2
"""The first makes gradients, the second adds to them: all that a window does."""
MAX_DIFFERENCE = 1e-3
"""Of a loss over two samples against the sum over each; rounding in half precision stays below."""


def across_samples(model: torch.nn.Module) -> list[str]:
    """Modules whose result for one sample depends on the others of its micro-batch, in words."""
    return [
        f"{name or type(module).__name__} is a {type(module).__name__}: its result depends on the micro-batch, so no "
        "split gives the same training"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training
    ][:1]


def warn_of_names(model: torch.nn.Module, loss_fn: Any) -> None:
    """A warning where a name says that a loss compares samples with each other."""
    named = [] if loss_fn is None else [getattr(loss_fn, "__name__", type(loss_fn).__name__)]
    named += [type(module).__name__ for module in model.modules()]
    for name in named:
        if any(part in name.lower().replace("_", "") for part in IN_BATCH):
            warn_user(
                f"{name} looks like a loss over pairs of a batch: in micro-batches it sees fewer of them, and learns "
                "something else; give micro_batch the whole batch, or a loss that caches its embeddings"
            )
            return


def check_once(loss_fn: Callable[[Any, Batch], torch.Tensor] | None) -> Callable[[Any, Batch], None]:
    """What looks at the outputs of passes: a loss of the user's is checked on the first of them."""
    waiting = [] if loss_fn is None else [loss_fn]

    def see(output: Any, batch: Batch) -> None:
        while waiting:
            check_loss(waiting[-1], output, batch)
            waiting.pop()

    return see


@torch.no_grad()
def check_loss(loss_fn: Callable[[Any, Batch], torch.Tensor], output: Any, batch: Batch) -> None:
    """Refuse a loss of two samples that is not the sum of their losses.

    Raises:
        WorkloadError: a mean in place of a sum, or a loss that compares samples with each other.
    """
    num_samples = next(iter(batch.values())).shape[0]
    if num_samples < 2:
        return
    both, first, second = (
        float(loss_fn(_rows(output, rows, num_samples), _rows(batch, rows, num_samples)))
        for rows in (slice(0, 2), slice(0, 1), slice(1, 2))
    )
    scale = max(abs(first), abs(second), abs(both), 1e-6)
    if abs(first + second - both) > MAX_DIFFERENCE * scale:
        raise WorkloadError(
            [
                f"loss_fn gives {both:.4g} for two samples, and {first:.4g} and {second:.4g} for each alone: not their "
                "sum, so the result would depend on the split"
            ],
            hint="return a sum (reduction='sum') over the samples, and their number from count_fn; losses that compare "
            "samples with each other need the whole batch in one micro-batch",
        )


def _rows(value: Any, rows: slice, num_samples: int) -> Any:
    """The same structure with some samples of every tensor that has one row for each."""
    if isinstance(value, torch.Tensor):
        return value.detach()[rows] if value.dim() and value.shape[0] == num_samples else value
    if isinstance(value, dict):
        made = {name: _rows(item, rows, num_samples) for name, item in value.items()}
        return made if type(value) is dict else type(value)(**made)
    if isinstance(value, list | tuple):
        return type(value)(_rows(item, rows, num_samples) for item in value)
    return value


FIRST_PATIENCE = 50
"""Windows without trouble before a shrunken micro-batch grows again; doubled whenever growing fails."""


class MicroBatchSize:
    """Samples of full length that one forward pass sees, now and at most.

    >>> size = MicroBatchSize(8)
    >>> size.shrink()
    >>> size.now
    4
    """

    def __init__(self, allowed: int) -> None:
        self.now = allowed
        self._allowed = allowed
        self._patience = FIRST_PATIENCE
        self._num_quiet = 0

    def quiet(self) -> None:
        """A window went through."""
        self._num_quiet += 1

    def trouble(self) -> None:
        """A window did not."""
        self._num_quiet = 0

    def shrink(self) -> None:
        """Half of it; one sample stays one."""
        if self.now < self._allowed:
            self._patience *= 2
        self.now = max(1, self.now // 2)

    def grow(self) -> None:
        """After a quiet time, twice as many."""
        if self.now < self._allowed and self._num_quiet >= self._patience:
            self.now = min(2 * self.now, self._allowed)
            self._num_quiet = 0

    def state_dict(self) -> dict[str, Any]:
        """For a resumed run."""
        return {"now": self.now, "allowed": self._allowed, "patience": self._patience, "num_quiet": self._num_quiet}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a `state_dict` was taken; not where another size has been asked for or planned since."""
        if state.get("allowed", self._allowed) == self._allowed:
            self.now, self._patience, self._num_quiet = state["now"], state["patience"], state["num_quiet"]


_Asked: Any = asked_of("precision", "offload", "attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings(_Asked):  # type: ignore[misc]
    """The settings of a workload that a step needs; the others change the model, which is prepared before."""

    micro_batch: int = 0
    """Samples of full length that one forward pass may see; more of shorter ones are allowed as long as their tokens,
    padding included, are no more."""
    seq: int | None = None
    """The full length; None takes that of the first batch."""
    texts_per_sample: int = 1
    """Rows of a batch that are one sample, where texts are compared."""
    row_texts: int | None = None
    """Of these, how many a packed row may have for each of its samples; None for any number."""
    precision: str = "fp32"
    """fp32, tf32, amp-fp16 (with a GradScaler), amp-bf16, bf16."""
    max_grad_norm: float | None = None
    """Clip the gradient of the whole batch to this norm."""
    memory: str | int | None = None
    """On a GPU, what PyTorch may reserve from now on. Segments made from now on can grow: those of fixed size are soon
    in pieces when lengths vary."""
    offload: str | None = None
    """`optimizer` takes the optimizer to host memory, with masters of the weights in fp32 and the sum of the gradients;
    `weights` does so too, for a model whose layers wait there."""
    host_memory: str | int | None = None
    """What that may take of the host's memory."""
    graphs: bool = False
    """Capture packed passes as CUDA graphs and replay them, once one has run eagerly. For amp-bf16 and bf16, on a GPU
    of sm_80 or newer; whatever cannot be captured runs eagerly. A change of the model is seen at the next step, but
    hooks are not called by a replay."""
    attention: str | None = None
    """`packed` packs batches; None does so where the model takes packed ones."""

    @property
    def trains(self) -> bool:
        """A step always does."""
        return True

    @property
    def host_bytes(self) -> int | None:
        """`host_memory` as a number."""
        return None if self.host_memory is None else parse_bytes(self.host_memory, name="host_memory")

    def rows(self, micro_batch: int, *, evenly: bool) -> Rows:
        """How packed passes of so many samples are filled."""
        return Rows(evenly, None if self.row_texts is None else micro_batch * self.row_texts)

    def largest_sizes(self, batch: Batch, micro_batch: int, seq: int, *, packs: bool) -> tuple[int, int]:
        """Sequences that are rehearsed, and tokens of each; of texts that are compared, as many as packed rows may
        have."""
        num_samples = REHEARSED_MICRO_BATCHES * micro_batch
        each = (self.row_texts if packs and PLACES in batch else None) or self.texts_per_sample
        num_rows = min(int(next(iter(batch.values())).shape[0]), num_samples * each)
        return num_rows, min(num_samples * self.texts_per_sample * seq // num_rows, seq)

    def check_ranks(self) -> None:
        """Refuse what several GPUs cannot share.

        Raises:
            WorkloadError: something waits in host memory.
        """
        if self.offloads:
            waits = SETTINGS[Offload.keyword].words(self)
            raise WorkloadError([f"{waits} is for one GPU: with several, shard the model (Shards)"])

    def check_change(self, workload: Workload, *, packs: bool) -> None:
        """Refuse a workload that a run with these settings cannot go on with from one step to the next.

        Args:
            packs: whether the run packs its batches.

        Raises:
            WorkloadError: what differs.
        """
        names = [f.name for f in fields(self) if f.name in (*PLANNED, "seq") and f.name not in LIVE]
        now = {name: getattr(self, name) for name in names} | ({Attention.keyword: "packed"} if packs else {})
        after = {name: getattr(workload, name) for name in now if name != "seq" or self.seq is not None}
        if not packs and not workload.is_packed and None in (now[Attention.keyword], after[Attention.keyword]):
            del after[Attention.keyword]  # the model's own, whichever it is
        problems = [
            f"{name} {value} cannot take the place of {now[name]} in a run"
            for name, value in after.items()
            if value != now[name]
        ]
        if problems:
            raise WorkloadError(problems, hint="plan with what the run has: give these settings to the plan")

    @classmethod
    def of(cls, plan: Plan | Workload | None, given: dict[str, Any]) -> Self:
        """Those that are given, and of the others those of a plan.

        Raises:
            WorkloadError: a keyword that a step does not have.
        """
        names = [field.name for field in fields(cls)]
        problems = [
            f"unknown keyword {name!r} (nearest: {', '.join(nearest_names(name, names))})"
            for name in given
            if name not in names
        ]
        if problems:
            raise WorkloadError(problems)
        made: dict[str, Any] = {}
        if plan is not None:
            workload = settings_of(plan)
            made = {name: getattr(workload, name) for name in names}
            made["memory"] = plan.budget_bytes if isinstance(plan, Plan) else workload.memory
        made |= {name: plain(value) for name, value in given.items() if value is not None}
        return cls(**made)


def check(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: StepSettings, loss_fn: Any, count_fn: Any
) -> None:
    """Every contradiction at once.

    Raises:
        WorkloadError: there is one.
    """
    micro_batch = settings.micro_batch
    problems = [*across_samples(model), *_wrong_values(settings), *_wrong_offload(model, settings)]
    if not isinstance(micro_batch, int) or isinstance(micro_batch, bool) or micro_batch < 1:
        shown = None if micro_batch == 0 else micro_batch
        problems.append(f"micro_batch {shown!r} is not a whole number from 1, and no plan gives one")
    if (loss_fn is None) != (count_fn is None):
        problems.append("loss_fn and count_fn go together: a sum, and what to divide it by")
    if settings.weight_dtype is torch.float16:
        problems.append("precision fp16 cannot train: take amp-fp16 (with a GradScaler), amp-bf16 or bf16")
    own = {id(p) for p in model.parameters()}
    if not settings.steps_on_host and not any(
        id(p) in own for group in optimizer.param_groups for p in group["params"]
    ):
        problems.append("the optimizer has no parameter of the model: make it of the prepared model's parameters")
    wrapped = [type(held) for held in vars(optimizer).values() if isinstance(held, torch.optim.Optimizer)]
    if wrapped:
        wrapper, name = type(optimizer).__name__, wrapped[0].__name__
        problems.append(f"{wrapper} is a wrapper: give {name} itself, and leave it out of `prepare`")
    if isinstance(optimizer, torch.optim.LBFGS):
        problems.append("LBFGS evaluates the loss inside its step, so a window cannot be done again")
    if problems:
        raise WorkloadError(problems)
    warn_of_names(model, loss_fn)


def check_batch(batch: Any) -> None:
    """Refuse a batch that holds no tensors, or tensors of different samples, before it is split.

    Raises:
        WorkloadError: what it holds.
    """
    if not isinstance(batch, Mapping) or not batch:
        what = "is empty" if isinstance(batch, Mapping) else f"is no dict, but of class {type(batch).__name__}"
        raise WorkloadError([f"the batch {what}"], hint="give a dict of tensors, one row a sample")
    others = [f"{name} ({type(v).__name__})" for name, v in batch.items() if not isinstance(v, torch.Tensor)]
    rows = {name: value.shape[0] if value.dim() else 0 for name, value in batch.items() if not others}
    others += [name for name, count in rows.items() if not count]
    if others:
        problem = f"{', '.join(others)} of the batch: not tensors with a row for each sample"
        raise WorkloadError([problem], hint="make tensors of arrays and lists with torch.as_tensor; leave out all else")
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise WorkloadError(
            [f"tensors of the batch differ in their rows: {counts}"], hint="give one row a sample in each of them"
        )


def _wrong_values(settings: StepSettings) -> list[str]:
    """Settings that have a value which is none, but for what is checked where it is used."""
    names = [
        f.name
        for f in fields(settings)
        if f.name in SETTINGS and f.name not in ("micro_batch", "memory", "host_memory")
    ]
    given = {name: value for name in names if (value := getattr(settings, name)) is not None}
    return [text for name, value in given.items() for text in SETTINGS[name].value.problems(name, value)]


def _wrong_offload(model: torch.nn.Module, settings: StepSettings) -> list[str]:
    """What does not go with where the weights are."""
    layers = offloading.layer_slots_of(model)
    if settings.offloads_inputs and layer_inputs_of(model) is None:
        return ["offload activations: no layer's input waits in host memory (layer_inputs.apply)"]
    if layers is None:
        return ["offload weights: no layer of the model waits in host memory"] if settings.offloads_layers else []
    if not layers.trains:
        return ["the model's layers were offloaded for inference: offloaded weights do not learn"]
    if not settings.offloads_layers:
        return ["the model's layers wait in host memory: take offload='weights'"]
    if not getattr(model, "is_gradient_checkpointing", False):
        return ["offload weights computes every layer again in backward: checkpointing must be full"]
    return []


def bring_packed(packed_by: torch.nn.Module | None, device: torch.device, batch: Batch) -> Batch:
    """A micro-batch on its device, packed where a model takes it so.

    Raises:
        WorkloadError: a model that is to take it so and was not prepared for it.
    """
    if packed_by is not None:
        if not packing.is_applied(packed_by):  # its sequences would see each other
            problem = f"attention packed: {type(packed_by).__name__} is not prepared for packed rows"
            raise WorkloadError([problem], hint="prepare it with vramfit.prepare(model, plan), or take attention sdpa")
        batch = packing.pack(batch, packed_by)
    return each_tensor(batch, lambda value: bring(value, device))


def autocast(device_type: str, dtype: torch.dtype | None, keeps_casts: bool) -> AbstractContextManager[Any]:
    """The context of a forward pass in a lower precision; none where there is no `dtype`."""
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype, cache_enabled=keeps_casts)


def largest_like(batch: Batch, num_samples: int, seq: int, *, packs: bool = False) -> Batch:
    """A batch of `num_samples` sequences of `seq` tokens, its samples and tokens repeated.

    A mask hides one token of each sequence, so that it is not taken for a mask that hides nothing; but not where the
    sequences are packed, since there a token less is a token less.
    """
    width = width_of(batch)
    device = next(iter(batch.values())).device
    rows = torch.arange(num_samples, device=device)
    columns = torch.arange(seq, device=device) % width
    made = {}
    for name, value in batch.items():
        chosen = value.index_select(0, rows % value.shape[0])
        made[name] = chosen.index_select(1, columns) if packing.is_per_token(name, chosen, width) else chosen
    if "attention_mask" in made and made["attention_mask"].dim() == PER_TOKEN:
        made["attention_mask"] = torch.ones_like(made["attention_mask"])
        if seq > PER_TOKEN and not packs:
            made["attention_mask"][:, 1] = 0
    return made
