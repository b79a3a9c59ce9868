"""What a Python prompt shows of a record: short, with the figures that were asked for."""

import pickle
from copy import deepcopy
from typing import Any

import pytest
from tests.unit.report.samples import estimate, max_batch
from tests.unit.report.test_html import run_record
from tests.unit.report.test_plan import sample
from tests.unit.report.test_watch import RECORD

from vramfit.records.codec import from_json, to_json
from vramfit.records.finding import LoadReport
from vramfit.records.measurement import Measurement, PhaseMeasurement, compare
from vramfit.records.plan import Change, Fitting
from vramfit.records.run import StepCourse
from vramfit.records.stream import Origin, Stream

MAX_CHARACTERS = 600
PHASE = PhaseMeasurement(peak_requested_bytes=2**30, peak_allocated_bytes=2**30, peak_reserved_bytes=3 * 2**30)
MEASUREMENT = Measurement(
    workload=estimate().workload,
    gpu="Tesla K80",
    compute_capability=(3, 7),
    total_memory_bytes=2**34,
    torch_version="2.11.0",
    transformers_version="5.17.0",
    driver_version=None,
    phases={"load": PHASE, "first_step": PHASE},
    steps=(PHASE,) * 500,
    step_times_s=(0.1,) * 500,
    num_retries=0,
    num_ooms=0,
    reserved_bytes=2**30,
    process_bytes=None,
    out_of_memory=None,
)
LOADED = LoadReport(
    model="folder",
    model_class="BertModel",
    task="features",
    device="cpu",
    precision="fp32",
    num_tensors=199,
    num_bytes=2**30,
    time_s=0.5,
    fresh=tuple(f"layer.{i}" for i in range(200)),
)
FITTING = Fitting(
    trainer="Trainer",
    model="BertModel",
    plan=sample(),
    changes=tuple(Change(name=f"argument_{i}", before="1", after="2", why="so") for i in range(9)),
)


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (estimate(), ["Estimate bert-base-uncased, train, batch 8 × 512 tokens", "k80", "allocated ", "Fits, with "]),
        (estimate(gpu=None), ["a GPU of sm_80", "Takes "]),
        (max_batch(), ["MaxBatch batch 14: bert-base-uncased", "512 tokens", "212 MiB short"]),
        (max_batch(0), ["not even one sample fits"]),
        (sample(), ["Plan bert-base-uncased, batch 32", "passes of 4, 8 a step", "amp-fp16", "0.8 s a step"]),
        (FITTING, ["Trainer with BertModel", "9 changes: argument_0, argument_1, argument_2, argument_3, …"]),
        (run_record(), ["cuda:0: completed", "20 steps", "accuracy 0.9000", "3.00 GiB reserved", "saved in out"]),
        (MEASUREMENT, ["Tesla K80", "500 steps", "reserved 3.00 GiB"]),
        (compare(estimate(), MEASUREMENT), ["prediction and measurement do not agree", "1 % allowed"]),
        (RECORD, ["cuda:0, 3 steps and 4 passes", "process 5.00 GiB", "1 finding: leak; 1 sample"]),
        (LOADED, ["folder as BertModel, fp32, on cpu", "199 tensors, 1.00 GiB", "200 fresh, 0 dropped"]),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else "",
)
def test_a_prompt_shows_a_record_in_three_lines(record: Any, parts: list[str]) -> None:
    shown = repr(record)
    assert shown.startswith(f"<{type(record).__name__} ")
    assert len(shown) < MAX_CHARACTERS
    assert shown.count("\n") <= 2
    for part in parts:
        assert part in shown
    assert pickle.loads(pickle.dumps(record)) == deepcopy(record) == record
    assert from_json(type(record), to_json(record)) == record


def test_a_stream_and_a_course_leave_their_events_out() -> None:
    stream = Stream(
        events=[512] * 4000,
        request_origins=[0] * 4000,
        origins=[Origin(operator="mm", module="", part="forward")],
        marks=[],
        parts=[],
    )
    course = StepCourse(
        step=3,
        device="cpu",
        batch=8,
        micro_batch=8,
        seq=16,
        num_events=9,
        requested_bytes=(1,) * 192,
        lengths=(5,) * 99,
    )
    assert repr(stream) == "<Stream of 4,000 events, 4,000 of them requests>"
    assert repr(course) == "StepCourse(step=3, device='cpu', batch=8, micro_batch=8, seq=16, num_events=9)"
