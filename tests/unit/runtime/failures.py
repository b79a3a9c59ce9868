"""Five steps of a small model in which memory runs out where it is told to, in several kinds of training."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.unit.runtime.small_models import make_batch, make_model

from vramfit.emulator.gpu import EmulatedGPU
from vramfit.runtime.stepper import Stepper
from vramfit.settings import checkpointing
from vramfit.settings import freeze as freezing
from vramfit.techniques import offloading

NUM_STEPS = 5
MAX_DIFFERENCE = 1e-6
"""Of weights after five steps in smaller micro-batches, against the clean run."""
TASK = "sequence-classification"
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "classifier_dropout": 0.1}


@dataclass(frozen=True)
class Kind:
    """A kind of training."""

    changes: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[torch.nn.Module], None] = lambda model: None
    optimizer: dict[str, Any] = field(default_factory=lambda: {"foreach": True})
    precision: Any = "fp32"
    offload: Any = None


def _let_layers_wait(model: torch.nn.Module) -> None:
    checkpointing.apply(model, "full")
    offloading.apply(model, 0, "cpu", trains=True)


KINDS = {
    "plain": Kind(),
    "dropout": Kind(DROPOUT),
    "fused": Kind(DROPOUT, optimizer={"fused": True}),
    "fp16 and GradScaler": Kind(DROPOUT, precision="amp-fp16"),
    "checkpointing": Kind(DROPOUT, prepare=lambda model: checkpointing.apply(model, "full")),
    "frozen": Kind(DROPOUT, prepare=lambda model: freezing.apply(model, "embeddings")),
    "optimizer offloaded": Kind(DROPOUT, optimizer={"fused": True}, offload="optimizer"),
    "weights offloaded": Kind(DROPOUT, prepare=_let_layers_wait, optimizer={"fused": True}, offload="weights"),
    "fp16, weights offloaded": Kind(DROPOUT, prepare=_let_layers_wait, precision="amp-fp16", offload="weights"),
}


@dataclass(frozen=True)
class Trained:
    """What five steps leave behind."""

    tensors: list[torch.Tensor]
    """Weights, then optimizer state."""
    losses: list[float]
    scale: float | None
    random: torch.Tensor
    last_allocations: list[int]
    """The number of the last allocation of each step."""
    num_failures: int
    """Allocations that failed."""
    num_recoveries: int
    micro_batch: int
    num_weights: int

    def equals(self, other: "Trained") -> bool:
        """To the bit, losses, state and random generator included."""
        pairs = zip([*self.tensors, self.random], [*other.tensors, other.random], strict=True)
        return (self.losses, self.scale) == (other.losses, other.scale) and all(torch.equal(a, b) for a, b in pairs)

    def distance(self, other: "Trained") -> tuple[float, float]:
        """‖w − w*‖ / ‖w*‖ over all weights, and the largest ‖Δ‖ of a tensor against the largest tensor norm."""
        ours, theirs = self.tensors[: self.num_weights], other.tensors[: other.num_weights]
        differences = torch.stack([(a - b).norm() for a, b in zip(ours, theirs, strict=True)])
        norms = torch.stack([b.norm() for b in theirs])
        return float(differences.norm() / norms.norm()), float(differences.max() / norms.max())


def train(
    kind: Kind,
    fail_at: Iterable[int] = (),
    *,
    micro_batch: int = 6,
    num_steps: int = NUM_STEPS,
    places: Sequence[int] = (),
) -> Trained:
    """Steps of twelve samples each, five unless told.

    Args:
        fail_at: allocations of the run that fail.
        places: for each step, which of its own allocations fails.
    """
    model = make_model("bert", TASK, num_hidden_layers=1, **kind.changes)
    kind.prepare(model)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-3, **kind.optimizer)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=NUM_STEPS)
    stepper = Stepper(
        model,
        optimizer,
        micro_batch=micro_batch,
        max_grad_norm=1.0,
        scheduler=scheduler,
        precision=kind.precision,
        offload=kind.offload,
    )
    batches = [make_batch(TASK, seed=seed % NUM_STEPS) for seed in range(num_steps)]
    torch.manual_seed(3)
    losses, last = [], []
    with EmulatedGPU("1GiB", fail_at=fail_at) as gpu:
        for number, batch in enumerate(batches):
            if places:
                gpu.fail_at = {gpu.num_allocations + places[number]}
            losses.append(stepper.step(batch))
            last.append(gpu.num_allocations)
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    state = [v for p in stepped for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    weights = [p.detach() for p in model.parameters()]
    return Trained(
        tensors=weights + state,
        losses=losses,
        scale=stepper.loss_scale,
        random=torch.get_rng_state(),
        last_allocations=last,
        num_failures=gpu.num_failures,
        num_recoveries=stepper.num_recoveries,
        micro_batch=stepper.micro_batch,
        num_weights=len(weights),
    )


@contextmanager
def quick() -> Iterator[None]:
    """Small tensors on one thread; garbage collection does not walk through all of transformers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(KINDS["plain"])
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
