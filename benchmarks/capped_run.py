"""Steps of `Stepper` under a memory cap; shared by `planned_runs.py` and `brute_force.py`."""

import time
from statistics import correlation, median
from typing import Any

NUM_WARM = 3
"""Steps at the beginning whose times do not count."""


def make_model(workload: Any) -> Any:
    """In host memory, with the workload's techniques; the GPU is ready for it."""
    import torch

    from vramfit.models.resolve import resolve
    from vramfit.runtime.measurement import prepare
    from vramfit.techniques.application import use_expandable_segments

    torch.cuda.init()
    if workload.allocator == "expandable":
        use_expandable_segments(torch.device("cuda"))
    return prepare(resolve(workload.model, task=workload.task, num_labels=workload.num_labels), workload)


def run_steps(model: Any, workload: Any, memory: int, num_steps: int, *, stop_at_recovery: bool) -> dict[str, Any]:
    """Steps of full length under the cap: how many, how long they took, and what happened to memory.

    Args:
        stop_at_recovery: the settings as they are, or nothing.
    """
    import torch

    from vramfit.errors import RecoveryExhausted
    from vramfit.runtime.stepper import Stepper
    from vramfit.techniques import optimizers

    w = workload
    times: list[float] = []
    outcome: dict[str, Any] = {}
    stepper = None
    try:
        optimizer = optimizers.make(w.optimizer, model.parameters())
        stepper = (_once(Stepper) if stop_at_recovery else Stepper)(
            model, optimizer, micro_batch=w.micro_batch, seq=w.seq, memory=memory, precision=w.precision,
            max_grad_norm=w.max_grad_norm,
        )  # fmt: skip
        for index in range(num_steps):
            batch = full_batch(w.batch, w.seq, index, task=w.task)
            torch.cuda.synchronize()
            began = time.perf_counter()
            stepper.step(batch)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    except (torch.OutOfMemoryError, RecoveryExhausted) as error:
        outcome["failed"] = type(error).__name__
    steady = times[NUM_WARM:]
    return outcome | {
        "num_steps": len(times),
        "num_recoveries": stepper.num_recoveries if stepper is not None else 0,
        "step_s": median(steady) if steady else None,
        **peaks("training"),
    }


def _once(stepper: Any) -> Any:
    """A `Stepper` that does not try again."""
    import torch

    class Once(stepper):  # type: ignore[misc]
        def _gradients(self, batch: Any) -> Any:
            self._drop_gradients()
            attempts: list[str] = []
            loss = self._try(batch, attempts, finishes=True)
            if loss is None:
                raise torch.OutOfMemoryError(attempts[0])
            return loss

    return Once


def peaks(phase: str) -> dict[str, int]:
    """The most that was allocated and reserved so far."""
    import torch

    return {
        f"{phase}_allocated_bytes": torch.cuda.max_memory_allocated(),
        f"{phase}_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def time_errors(lines: list[dict[str, Any]]) -> str:
    """Predicted seconds a step beside measured ones, in words."""
    timed = [line for line in lines if line.get("step_s") and line.get("predicted_step_s")]
    if len(timed) < 2:
        return "none"
    errors = [abs(line["predicted_step_s"] / line["step_s"] - 1) for line in timed]
    ranks = [[sorted(figures).index(f) for f in figures] for figures in _columns(timed)]
    return f"{len(timed)}, off by {median(errors):.1%} at the median, rank correlation {correlation(*ranks):.3f}"


def _columns(lines: list[dict[str, Any]]) -> list[list[float]]:
    return [[line[name] for line in lines] for name in ("predicted_step_s", "step_s")]


def full_batch(size: int, seq: int, seed: int, *, task: str = "sequence-classification") -> dict[str, Any]:
    """Samples of full length, one of two padded by a token: the dearest that a sampler can give.

    Args:
        task: sequence-classification, or pretraining with one token in seven to be guessed.
    """
    import torch

    draw = torch.Generator().manual_seed(seed)
    mask = torch.ones(size, seq, dtype=torch.long)
    mask[1::2, -1] = 0
    ids = torch.randint(1000, 30000, (size, seq), generator=draw) * mask + (1 - mask)
    labels = {"labels": torch.randint(0, 2, (size,), generator=draw)}
    if task == "pretraining":
        guessed = torch.where(torch.arange(seq) % 7 == 1, ids, -100)
        labels = {"labels": guessed, "next_sentence_label": labels["labels"]}
    return {"input_ids": ids, "attention_mask": mask, **labels}
