"""What the ranks of a test do: a few steps of a small model, shared out, with memory that may run out on one."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from tests.unit.runtime.small_models import make_batch, make_model
from torch.utils._python_dispatch import TorchDispatchMode

from vramfit.runtime.distributed.accord import Accord
from vramfit.runtime.distributed.replicas import Replicas
from vramfit.runtime.distributed.sharded import Shards
from vramfit.runtime.distributed.world import join, launched_world, leave
from vramfit.runtime.stepper import Stepper
from vramfit.step.inputs import Batch
from vramfit.step.own_parts import full
from vramfit.techniques import checkpointing, packing

SIZES = (12, 12, 5, 1)
"""Samples of each window: the last ones are uneven, and one is less than there are ranks."""


WITHOUT_MEMORY = ("_unsafe_view", "_reshape_alias", "unflatten_dense_tensors")
"""Operators whose schemas do not say that what they give is a view."""


class RunsOut(TorchDispatchMode):
    """Memory runs out at the operators of these numbers, each once; only those count that ask for memory."""

    def __init__(self, fail_at: Any = ()) -> None:
        super().__init__()
        self.fail_at = set(fail_at)
        self.num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        asks = any(r.alias_info is None for r in schema.returns) and not schema.name.startswith("c10d")
        if not asks or schema.name.partition("::")[2] in WITHOUT_MEMORY:
            return func(*args, **(kwargs or {}))
        self.num_operators += 1
        if self.num_operators in self.fail_at:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Injected at operator {self.num_operators}")
        return func(*args, **(kwargs or {}))


def train_all(cases: list[tuple[str | None, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Several trainings, one after another, in one world."""
    world = launched_world()
    if world is not None:
        join(world, torch.device("cpu"))
    try:
        return [train(parallel, **keywords) for parallel, keywords in cases]
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
    accord = Accord(world.rank, world.size)
    yield Replicas(model, accord) if parallel == "ddp" else Shards(model, accord)


def window(task: str, size: int, seed: int) -> Batch:
    """An effective batch of so many samples, uneven in lengths and labels."""
    return {name: value[:size] for name, value in make_batch(task, max(size, 12), seed).items()}


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
) -> dict[str, Any]:
    """A few steps; gives weights, losses, and how it went."""
    model = make_model(family, task, **(changes or {}))
    if checkpoints:
        checkpointing.apply(model, "full")
    if packs:
        packing.apply(model, task)
    with ranks_of(model, parallel) as ranks:
        made = torch.optim.AdamW(model.parameters(), lr=1e-3, **(optimizer or {}))
        stepper = Stepper(model, made, micro_batch=micro_batch, max_grad_norm=0.5, precision=precision, ranks=ranks)
        rank = 0 if ranks is None else ranks.rank
        failing = (fail_at or {}).get(rank, ())
        mode = RunsOut(failing) if failing or counts_operators else nullcontext()
        windows = [window(task, size, seed) for seed, size in enumerate(sizes)]
        with mode:
            losses = [stepper.step(batch) for batch in windows]
        weights = {name: full(p).detach().clone().numpy() for name, p in model.named_parameters()}
        return {
            "weights": weights,
            "losses": losses,
            "num_recoveries": stepper.num_recoveries,
            "micro_batch": stepper.micro_batch,
            "num_operators": getattr(mode, "num_operators", 0),
            "loss_scale": stepper.loss_scale,
        }


def distance(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """‖w − w*‖ / ‖w*‖ over all weights."""
    pairs = [(torch.from_numpy(ours[name]), torch.from_numpy(theirs[name])) for name in theirs]
    difference = torch.stack([(a - b).norm() for a, b in pairs]).norm()
    return float(difference / torch.stack([b.norm() for _, b in pairs]).norm())


def train_until_told(parallel: str, what: str) -> Any:
    """Two steps; in the second, rank 1 does what it is told: ends, raises, or takes another batch."""
    model = make_model("bert", "sequence-classification")
    with ranks_of(model, parallel) as ranks:
        seen = []

        def loss(output: Any, batch: Batch) -> torch.Tensor:
            seen.append(1)
            if ranks.rank == 1 and len(seen) > 1 and what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if ranks.rank == 1 and len(seen) > 1 and what == "raises":
                raise ValueError("row 7 is no number")
            return torch.nn.functional.cross_entropy(output.logits, batch["labels"], reduction="sum")

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        stepper = Stepper(
            model, optimizer, micro_batch=8, ranks=ranks, loss_fn=loss, count_fn=lambda b: int(b["labels"].numel())
        )
        for step in range(2):
            other = what == "other batch" and step == 1
            stepper.step(window("sequence-classification", 8, seed=ranks.rank if other else 0))
    return None
