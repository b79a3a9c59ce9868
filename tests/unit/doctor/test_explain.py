"""What is to blame, in words and figures, and the plan that fits."""

import pytest
from tests.unit.doctor.real_messages import MESSAGES, Reported

from vramfit.doctor.explain import explain
from vramfit.errors import UnknownGPU, VramfitError
from vramfit.records.codec import from_json, to_json
from vramfit.records.watch import Explanation
from vramfit.report.findings import gpu_of_plan
from vramfit.units import format_bytes

GIB = 2**30
T4 = (
    "CUDA out of memory. Tried to allocate 384.00 MiB. GPU 0 has a total capacity of 14.56 GiB of which 100.00 MiB is "
    "free. Including non-PyTorch memory, this process has 14.46 GiB memory in use. Of the allocated memory 14.00 GiB "
    "is allocated by PyTorch, and 20.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize("reported", MESSAGES, ids=lambda r: f"{r.year} {r.where.split(' ')[0]}")
def test_reported_messages_are_explained(reported: Reported) -> None:
    said = explain(reported.text)
    assert (said.cause, said.gpu) == (reported.cause, reported.gpu)
    assert said.findings[0].fix
    asked = said.message.requested_bytes
    if asked is not None:
        assert format_bytes(asked) in said.headline
    if said.message.total_bytes is not None and said.message.allocated_bytes <= said.message.total_bytes:
        assert sum(h.num_bytes for h in said.holdings) == pytest.approx(said.message.total_bytes, rel=0.01)


def test_other_processes_are_named_and_the_cache_is_not_blamed_first() -> None:
    said = explain(next(r.text for r in MESSAGES if "FireRed" in r.where))
    assert "process 1493972" in said.findings[0].what
    assert [h.name for h in said.holdings].count("other process") == 2


def test_much_cache_is_fragmentation_and_says_what_to_set() -> None:
    said = explain(next(r.text for r in MESSAGES if "vdsr" in r.where))
    assert "expandable_segments:True" in said.findings[0].fix
    assert "1.67 GiB" in said.findings[0].what


def test_a_gpu_is_recognised_by_its_capacity_and_the_budget_is_what_pytorch_could_have() -> None:
    said = explain(T4)
    assert said.gpu == "t4"
    assert said.budget_bytes == pytest.approx(14.00 * GIB + 120 * 2**20, abs=2**20)


def test_with_a_model_the_plan_keeps_the_batch_and_fits() -> None:
    said = explain(T4, model="bert-tiny", batch=4096, seq=128)
    assert said.plan is not None
    assert said.plan.workload.batch == 4096
    assert said.plan.workload.gpu == "t4"
    assert said.plan.estimate.safe_reserved_bytes <= said.budget_bytes


def test_of_several_gpus_with_this_capacity_the_plan_is_for_the_one_that_can_least() -> None:
    log = T4.replace("14.56 GiB", "11.63 GiB").replace("14.46 GiB", "11.52 GiB").replace("14.00 GiB", "11.00 GiB")
    said = explain(log, model="bert-tiny", batch=64, seq=128)
    assert (said.gpu, said.gpus_alike) == ("rtx-3060", ("rtx-3080-ti",))
    assert said.plan is not None
    assert said.plan.workload.gpu == "rtx-3060"
    assert "The plan is for rtx-3060; rtx-3080-ti has as much memory: --gpu" in (gpu_of_plan(said) or "")
    named = explain(log, model="bert-tiny", batch=64, seq=128, gpu="rtx-3080-ti")
    assert (named.gpu, named.gpus_alike, gpu_of_plan(named)) == ("rtx-3080-ti", (), None)


@pytest.mark.parametrize(
    ("capacity", "gpu", "words"),
    [("14.76 GiB", "t4", "the plan is for t4, whose memory is nearest"), ("17.00 GiB", None, "for the memory alone")],
)
def test_a_capacity_that_no_gpu_has_is_planned_for_on_the_nearest_or_as_memory(
    capacity: str, gpu: str | None, words: str
) -> None:
    said = explain(T4.replace("14.56 GiB", capacity), model="bert-tiny", batch=64, seq=128)
    assert said.gpu is None
    assert said.plan is not None
    assert (said.plan.workload.gpu, said.plan.budget_bytes) == (gpu, said.budget_bytes)
    line = (gpu_of_plan(said) or "").replace("\xa0", " ")
    assert f"No GPU of the catalogue has {capacity}" in line
    assert words in line


def test_where_nothing_fits_the_reason_is_given() -> None:
    small = T4.replace("14.56 GiB", "0.20 GiB").replace("14.46 GiB", "0.15 GiB").replace("14.00 GiB", "0.10 GiB")
    said = explain(small, model="bert-large-uncased", batch=8, seq=512)
    assert said.plan is None
    assert said.no_plan is not None
    assert "too little" in said.no_plan


def test_a_message_without_a_gpu_asks_for_one() -> None:
    said = explain("RuntimeError: CUDA error: out of memory", model="bert-tiny")
    assert said.no_plan is not None
    assert "--gpu" in said.no_plan


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UnknownGPU):
        explain(T4, gpu="t44")
    with pytest.raises(VramfitError, match="no out-of-memory message"):
        explain("all is well")


def test_an_explanation_is_saved_and_read_back() -> None:
    said = explain(T4)
    assert from_json(Explanation, to_json(said)) == said
