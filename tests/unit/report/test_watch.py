"""A watched program and an explained message on the terminal."""

from tests.unit.report.samples import drawn

from vramfit.doctor.explain import explain
from vramfit.records.watch import (
    LiveTensors,
    MemoryFinding,
    MemorySample,
    OutOfMemoryReport,
    PhaseUse,
    WatchRecord,
    layers_together,
)
from vramfit.report.findings import render_explanation, render_live, render_watch

GIB = 2**30
FINDING = MemoryFinding(
    check="watch.leak", module="encoder.3", source="train.py:7", num_bytes=GIB, what="it leaks", why="so", fix="stop it"
)
RECORD = WatchRecord(
    device="cuda:0",
    detailed=False,
    time_s=12.0,
    num_steps=3,
    num_forwards=4,
    capacity_bytes=16 * GIB,
    phases={"forward": PhaseUse(num_times=4, time_s=1.0, peak_requested_bytes=GIB, peak_allocated_bytes=2 * GIB)},
    peak_requested_bytes=GIB,
    peak_allocated_bytes=2 * GIB,
    peak_reserved_bytes=4 * GIB,
    peak_process_bytes=5 * GIB,
    num_retries=2,
    samples=(
        MemorySample(
            time_s=1.0,
            phase="forward",
            step=2,
            requested_bytes=GIB,
            allocated_bytes=2 * GIB,
            reserved_bytes=4 * GIB,
            process_bytes=5 * GIB,
        ),
    ),
    findings=(FINDING,),
    notes=("something was not seen",),
)


def test_the_end_shows_phases_counters_findings_and_notes() -> None:
    text = drawn(render_watch(RECORD)).replace("\N{NO-BREAK SPACE}", " ")
    for part in ("forward", "2.00 GiB", "50%", "2 times", "5.00 GiB", "train.py:7 in encoder.3: it leaks", "→ stop it"):
        assert part in text, part
    assert "Something was not seen." in text
    assert "lower bounds" in text


def test_the_live_view_is_short_and_has_all_four_figures() -> None:
    text = drawn(render_live(RECORD)).replace("\N{NO-BREAK SPACE}", " ")
    assert len(text.splitlines()) <= 12
    for part in ("requested", "allocated", "reserved", "process", "now forward", "of 16.00 GiB", "! train.py:7"):
        assert part in text, part


def test_the_same_tensors_of_all_layers_are_one_line() -> None:
    groups = tuple(
        LiveTensors(
            category="activations", module=f"bert.layer.{n}.dense", operator="addmm", num_tensors=1, num_bytes=8
        )
        for n in range(12)
    )
    (merged,) = layers_together(groups)
    assert (merged.module, merged.num_tensors, merged.num_bytes) == ("bert.layer.*.dense", 12, 96)
    assert layers_together(groups[:1])[0].module == "bert.layer.0.dense"


def test_a_report_of_out_of_memory_reads_in_plain_lines() -> None:
    alive = (LiveTensors(category="weights", num_tensors=3, num_bytes=GIB),)
    report = OutOfMemoryReport(
        message="CUDA out of memory",
        phase="backward",
        step=4,
        module="bert",
        operator="addmm",
        source="train.py:9",
        allocated_bytes=GIB,
        reserved_bytes=2 * GIB,
        alive=alive,
        findings=(FINDING,),
    )
    text = "\n".join(report.lines())
    for part in ("in backward, step 4, addmm in bert", "train.py:9", "1.00 GiB cached", "weights (× 3)", "→ stop it"):
        assert part in text, part


def test_an_explanation_shows_who_held_what() -> None:
    said = explain(
        "CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 15.90 GiB total capacity; 13.13 GiB already "
        "allocated; 415.88 MiB free; 14.80 GiB reserved in total by PyTorch)"
    )
    text = drawn(render_explanation(said)).replace("\N{NO-BREAK SPACE}", " ")
    for part in ("Out of memory: fragmentation", "13.13 GiB", "1.67 GiB", "as a p100 has", "expandable_segments:True"):
        assert part in text, part
