"""What the ranks of a test do: a few steps of a small model, shared out, with memory that may run out on one."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from tests.unit.runtime.small_models import LENGTH, make_batch, make_model
from torch.utils._python_dispatch import TorchDispatchMode

from vramfit.runtime.distributed import votes
from vramfit.runtime.distributed.parallel import Replicas, Shards
from vramfit.runtime.distributed.processes import join, launched_world, leave
from vramfit.runtime.distributed.votes import RankVotes
from vramfit.runtime.stepper import Stepper
from vramfit.settings import checkpointing
from vramfit.step.own_loss import full
from vramfit.step.plain import Batch
from vramfit.techniques import packing

SIZES = (12, 12, 5, 1)
"""Samples of each window: the last ones are uneven, and one is less than there are ranks."""


WITHOUT_MEMORY = ("_unsafe_view", "_reshape_alias", "unflatten_dense_tensors", "_local_scalar_dense")
"""Operators whose schemas do not say that what they give is a view, or a number on the host."""


class RunsOut(TorchDispatchMode):
    """Memory runs out at the operators of these numbers, each once; only those count that ask for memory."""

    def __init__(self, fail_at: Any = (), *, notes_parts: bool = False) -> None:
        super().__init__()
        self.fail_at = set(fail_at)
        self.parts: list[str] | None = [] if notes_parts else None
        """Of every operator that asks for memory, the part of the step, if asked for."""
        self.num_operators = 0
        self.places: list[tuple[str, str]] = []
        """For each failure, the part of the step and the operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        asks = any(r.alias_info is None for r in schema.returns) and not schema.name.startswith(("c10d", "profiler"))
        if not asks or schema.name.partition("::")[2] in WITHOUT_MEMORY:
            return func(*args, **(kwargs or {}))
        self.num_operators += 1
        if self.parts is not None:
            self.parts.append(_part_of_step())
        if self.num_operators in self.fail_at:
            self.places.append((_part_of_step(), schema.name.partition("::")[2]))
            raise torch.OutOfMemoryError(f"CUDA out of memory. Injected at operator {self.num_operators}")
        return func(*args, **(kwargs or {}))


PARTS = {
    "take_step": "optimizer step",
    "secure_state": "optimizer state",
    "clip": "clipping",
    "synchronise": "reducing gradients",
    "foreach_reduce": "scattering gradients",
    "unshard": "gathering a layer",
    "wait_for_unshard": "gathering a layer",
}
"""Functions by which a part of the step is known."""


def _part_of_step() -> str:
    """Where this thread is: in one of the parts that have a name, else in a backward or a forward pass."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in PARTS:
            return PARTS[frame.f_code.co_name]
        frame = frame.f_back
    return "forward" if torch._C._current_graph_task_id() == -1 else "backward"


def train_all(cases: list[tuple[str | None, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Several trainings, one after another, in one world."""
    return _in_one_world(train, cases)


def _in_one_world(function: Any, cases: list[tuple[str | None, dict[str, Any]]]) -> list[dict[str, Any]]:
    world = launched_world()
    if world is not None:
        join(world, torch.device("cpu"))
    try:
        return [function(parallel, **keywords) for parallel, keywords in cases]
    finally:
        leave()


@contextmanager
def ranks_of(model: torch.nn.Module, parallel: str | None) -> Iterator[Any]:
    """The processes of the world this one was launched into."""
    world = launched_world()
    if world is None or parallel is None:
        yield None
        return
    join(world, torch.device("cpu"))
    votes = RankVotes(world.rank, world.size)
    yield Replicas(model, votes) if parallel == "ddp" else Shards(model, votes)


def window(task: str, size: int, seed: int, *, is_long: bool = False) -> Batch:
    """An effective batch of so many samples, uneven in lengths and labels; long ones fill more than half a row."""
    batch = {name: value[:size] for name, value in make_batch(task, max(size, 12), seed).items()}
    if is_long:
        batch["attention_mask"][:, : LENGTH // 2 + 1] = 1
        batch["input_ids"] = torch.where(batch["input_ids"] == 0, 7, batch["input_ids"]) * batch["attention_mask"]
    return batch


def train(
    parallel: str | None,
    *,
    family: str = "bert",
    task: str = "sequence-classification",
    sizes: tuple[int, ...] = SIZES,
    micro_batch: int = 2,
    precision: Any = "fp32",
    fail_at: dict[int, tuple[int, ...]] | None = None,
    counts_operators: bool = False,
    changes: dict[str, Any] | None = None,
    checkpoints: bool = False,
    packs: bool = False,
    optimizer: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """A few steps; gives weights, losses, and how it went."""
    model = make_model(family, task, **(changes or {})).to(dtype)
    if checkpoints:
        checkpointing.apply(model, "full")
    if packs:
        packing.apply(model, task)
    with ranks_of(model, parallel) as ranks:
        made = torch.optim.AdamW(model.parameters(), lr=1e-3, **(optimizer or {}))
        stepper = Stepper(model, made, micro_batch=micro_batch, max_grad_norm=0.5, precision=precision, ranks=ranks)
        rank = 0 if ranks is None else ranks.rank
        failing = (fail_at or {}).get(rank, ())
        mode = RunsOut(failing, notes_parts=counts_operators) if failing or counts_operators else nullcontext()
        windows = [window(task, size, seed) for seed, size in enumerate(sizes)]
        with mode:
            losses = [stepper.step(batch) for batch in windows]
        weights = {name: full(p).detach().clone().numpy() for name, p in model.named_parameters()}
        return {
            "weights": weights,
            "losses": losses,
            "num_recoveries": stepper.num_recoveries,
            "micro_batch": stepper.micro_batch,
            "parts": getattr(mode, "parts", None),
            "places": getattr(mode, "places", []),
            "loss_scale": stepper.loss_scale,
        }


def gradient(
    parallel: str | None, *, task: str, precision: Any = "fp32", micro_batch: int = 1, size: int = 11
) -> dict[str, Any]:
    """The gradient of one window, by parameter: what a plain step of length one subtracts.

    Rows are too long for two to share a micro-batch of one: however samples are shared out, every pass sees the same.
    """
    model = make_model("bert", task)
    with ranks_of(model, parallel) as ranks:
        before = {name: full(p).detach().clone() for name, p in model.named_parameters()}
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        stepper = Stepper(model, plain, micro_batch=micro_batch, precision=precision, ranks=ranks)
        stepper.step(window(task, size, seed=3, is_long=True))
        return {name: (before[name] - full(p).detach()).numpy() for name, p in model.named_parameters()}


def gradients(cases: list[tuple[str | None, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Several of them, in one world."""
    return _in_one_world(gradient, cases)


def distance(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """‖w − w*‖ / ‖w*‖ over all weights."""
    pairs = [(torch.from_numpy(ours[name]), torch.from_numpy(theirs[name])) for name in theirs]
    difference = torch.stack([(a - b).norm() for a, b in pairs]).norm()
    return float(difference / torch.stack([b.norm() for _, b in pairs]).norm())


class _NumbersFail(TorchDispatchMode):
    """What a device gives to the host is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise ValueError("the device has failed")
        return func(*args, **(kwargs or {}))


def _fail_after_step(stepper: Any) -> None:
    usual = stepper._step.commit

    def commit(room: Any) -> bool:
        taken: bool = usual(room)
        _NumbersFail().__enter__()
        return taken

    stepper._step.commit = commit


def _fail_in_collective(what: str) -> None:
    """One that comes in the middle, after the vote."""
    usual = torch.distributed.all_reduce

    def all_reduce(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        if tensor.is_floating_point() and tensor.numel() > 1:  # no vote
            if what.startswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise torch.OutOfMemoryError("CUDA out of memory. Injected in the collective")
        return usual(tensor, *arguments, **keywords)

    torch.distributed.all_reduce = all_reduce


class _Asked:
    """The meeting point as rank 0 uses it, which tells when a late rank was asked for a second time."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._name, self._times = store, f"vramfit/alive/{rank}", 0

    def check(self, names: list[str]) -> bool:
        self._times += names == [self._name]
        if self._times == 2:
            self._store.set("asked twice", "1")
        return bool(self._store.check(names))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _come_late(made: RankVotes, late: int) -> None:
    """Nobody has patience for last words, and one rank has none until it was asked for them twice."""
    votes.LAST_WORDS_S = 0.0
    lost = made._lost

    def when_asked(error: RuntimeError) -> Any:
        with suppress(RuntimeError):  # the meeting point is gone
            made._store.wait(["asked twice"])
        return lost(error)

    if made.rank == 0:
        made._store = _Asked(made._store, late)
    if made.rank == late:
        made._lost = when_asked  # type: ignore[method-assign]


def train_until_told(parallel: str, what: str, who: int = 1, late: int | None = None) -> Any:
    """Two steps; in the second, one rank does what it is told: ends, raises, or takes another batch."""
    model = make_model("bert", "sequence-classification")
    with ranks_of(model, parallel) as ranks:
        if late is not None:
            _come_late(ranks.votes, late)
        seen = []

        def loss(output: Any, batch: Batch) -> torch.Tensor:
            seen.append(1)
            if ranks.rank == who and len(seen) > 1 and what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if ranks.rank == who and len(seen) > 1 and what == "raises":
                raise ValueError("row 7 is no number")
            return torch.nn.functional.cross_entropy(output.logits, batch["labels"], reduction="sum")

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        stepper = Stepper(
            model, optimizer, micro_batch=8, ranks=ranks, loss_fn=loss, count_fn=lambda b: int(b["labels"].numel())
        )
        if what == "fails late" and ranks.rank == who:
            _fail_after_step(stepper)
        if what.endswith("in the collective") and ranks.rank == who:
            _fail_in_collective(what)
        for step in range(2):
            other = what == "other batch" and step == 1
            stepper.step(window("sequence-classification", 8, seed=ranks.rank if other else 0))
    return None
