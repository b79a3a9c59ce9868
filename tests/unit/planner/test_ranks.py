"""Plans for several GPUs: replicas or shards, the effective batch kept, assumptions said."""

import pytest

from vramfit.errors import NoPlanFits, WorkloadError
from vramfit.planner.plan import plan

JOB = {"model": "bert-small", "batch": 32, "seq": 128, "gpu": "a100-80gb"}


def test_where_the_whole_model_fits_every_gpu_has_it_and_the_batch_is_shared() -> None:
    found = plan(**JOB, num_gpus=4, precision="fp32", optimizer="adamw-fused")
    w = found.workload
    assert (w.parallel, w.num_gpus, w.batch, w.share) == ("ddp", 4, 32, 8)
    assert found.micro_batch * found.accumulate >= w.share
    assert found.reasons[0].setting == "parallel ddp"
    assert any("NCCL's own buffers" in note for note in found.notes)


def test_where_it_does_not_each_gpu_has_a_part() -> None:
    budget = {"memory": "460MiB", "precision": "fp32", "optimizer": "adamw-fused", "margin": 0}
    with pytest.raises(NoPlanFits):
        plan(**JOB, **budget, num_gpus=16, parallel="ddp")
    found = plan(**JOB, **budget, num_gpus=16)
    assert found.workload.parallel == "fsdp"
    assert "ddp does not fit" in found.reasons[0].why


def test_512_gpus_on_paper_say_what_is_assumed_and_talk_costs_time() -> None:
    big = {**JOB, "batch": 2048, "precision": "amp-bf16", "parallel": "ddp"}
    near, far = plan(**big, num_gpus=512), plan(**big, num_gpus=512, num_nodes=64)
    assert far.workload.share == 4
    assert far.step_time_s > near.step_time_s
    assert far.estimate.safe_reserved_bytes == near.estimate.safe_reserved_bytes
    assert any("between 64 machines; not measured" in note for note in far.notes)
    assert far.estimate.basis == "derived"


def test_offloading_is_for_one_gpu() -> None:
    with pytest.raises(WorkloadError, match="for one GPU"):
        plan(**JOB, num_gpus=2, offload="optimizer")
