"""On a real GPU: the run, and the prediction beside it."""

import json
from dataclasses import replace

import pytest
from tests.integration.command import vramfit

from vramfit.runtime.measurement import measure
from vramfit.workload import Workload

pytestmark = pytest.mark.gpu

WORKLOAD = Workload(model="bert-tiny", batch=8, seq=77, precision="amp-fp16")


def test_every_phase_is_measured_and_figures_are_in_order() -> None:
    made = measure(WORKLOAD)
    assert list(made.phases) == ["load", "inputs", "first_step", "steady_step"]
    for peaks in (*made.phases.values(), *made.steps):
        assert 0 < peaks.peak_requested_bytes <= peaks.peak_allocated_bytes <= peaks.peak_reserved_bytes
    assert made.out_of_memory is None
    assert len(made.step_times_s) == 3


def test_two_runs_take_the_same_to_the_byte() -> None:
    assert measure(WORKLOAD).phases == measure(WORKLOAD).phases


def test_the_first_fp16_step_makes_the_optimizer_state() -> None:
    first, second, _ = measure(WORKLOAD).steps
    assert abs(first.peak_allocated_bytes - second.peak_allocated_bytes) < 0.2 * second.peak_allocated_bytes


def test_expandable_segments_are_another_allocator() -> None:
    expandable = measure(replace(WORKLOAD, allocator="expandable"))
    assert expandable.phases["load"].peak_reserved_bytes != measure(WORKLOAD).phases["load"].peak_reserved_bytes


def test_running_out_of_memory_is_a_result() -> None:
    made = measure(replace(WORKLOAD, memory=40 * 2**20))
    assert made.out_of_memory is not None
    assert "out of memory" in made.out_of_memory
    assert made.num_ooms >= 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("bert-base-uncased", "--batch", "4", "--seq", "128"),
        ("bert-base-uncased", "--batch", "4", "--seq", "128", "--precision", "amp-bf16", "--optimizer", "adamw-fused"),
        ("distilbert-base-uncased", "--mode", "infer", "--batch", "8", "--seq", "77", "--precision", "bf16"),
    ],
)
def test_the_verb_agrees_with_the_gpu(arguments: tuple[str, ...]) -> None:
    done = vramfit("measure", *arguments, "--json", "--tolerance", "0.01")
    assert done.code == 0, done.out + done.err
    assert json.loads(done.out)["agrees"]
