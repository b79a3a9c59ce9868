"""What is predicted for one GPU of several is what DDP and FSDP2 really hold, but for what only CUDA asks for."""

from tests.unit.runtime.distributed import live
from tests.unit.runtime.distributed.launch import run_ranks

from vramfit.estimator.predict import estimate
from vramfit.workload import Workload

MAX_ERROR = 0.002
WORLDS = [("ddp", 2, 1), ("ddp", 8, 2), ("fsdp", 2, 1), ("fsdp", 4, 3), ("fsdp", 8, 2)]


def test_one_rank_holds_what_was_predicted_for_it() -> None:
    """Weights outweigh activations here, which a CPU makes otherwise than a GPU."""
    shapes = [
        {"batch": 2 * passes * n, "micro_batch": 2, "seq": 8, "num_gpus": n, "parallel": parallel}
        for parallel, n, passes in WORLDS
    ]
    common = {"loop": "stepper", "optimizer": "adamw-fused"}
    (ended,) = run_ranks(live.peaks_of, 1, [Workload(model="bert-mini", **shape, **common) for shape in shapes])
    assert ended.value is not None, ended.trace
    for world, shape, held_bytes in zip(WORLDS, shapes, ended.value, strict=True):
        found = estimate("bert-mini", gpu="h200", **shape, **common)
        predicted_bytes = found.peak_requested_bytes - found.breakdown["workspaces"]
        assert abs(predicted_bytes / held_bytes - 1) < MAX_ERROR, (world, predicted_bytes, held_bytes)
