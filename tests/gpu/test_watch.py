"""The watch on a real GPU: agreement with torch's own counters, phases, habits by line, overhead, out of memory."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from vramfit.loader.load import load
from vramfit.monitor.watch import Watch
from vramfit.runtime.watching import watch

pytestmark = pytest.mark.gpu

MODEL, SEQ = "bert-base-uncased", 128
MIB = 2**20
HERE = Path(__file__)
MAX_OVERHEAD = 0.02
NUM_WARM, NUM_PAIRS, STEPS_A_ROUND = 2, 16, 10


def line_of(marker: str) -> str:
    lines = HERE.read_text().splitlines()
    found = [number for number, line in enumerate(lines, start=1) if line.endswith(f"# {marker}")]
    assert len(found) == 1, marker
    return f"{HERE.name}:{found[0]}"


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model, _ = load(MODEL, random_weights=True, device="cuda")
    return model.train()


def make_batch(size: int = 16) -> dict[str, torch.Tensor]:
    mask = torch.ones(size, SEQ, dtype=torch.long, device="cuda")
    mask[:, -1] = 0
    return {
        "input_ids": torch.randint(1000, 30000, (size, SEQ), device="cuda"),
        "attention_mask": mask,
        "labels": torch.randint(0, 2, (size,), device="cuda"),
    }


def stepping(model: torch.nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch = make_batch()

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def quiet(**keywords: Any) -> Watch:
    return watch(stream=io.StringIO(), plan_on_failure=False, **keywords)


def test_peaks_and_counts_are_those_of_torch() -> None:
    with quiet() as w:
        step = stepping(make_model())
        for _ in range(6):
            step()
    stats, record = torch.cuda.memory_stats(), w.record
    assert record.device == "cuda:0"
    assert record.peak_requested_bytes == stats["requested_bytes.all.peak"]
    assert record.peak_allocated_bytes == stats["allocated_bytes.all.peak"] == torch.cuda.max_memory_allocated()
    assert record.peak_reserved_bytes == stats["reserved_bytes.all.peak"]
    assert record.samples[-1].allocated_bytes == torch.cuda.memory_allocated()
    assert (record.num_retries, record.num_ooms, record.num_steps) == (0, 0, 6)
    assert not [note for note in record.notes if "missed" in note]


def test_the_process_holds_more_than_was_reserved() -> None:
    with quiet(interval_s=0.1) as w:
        step = stepping(make_model())
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        time.sleep(2.5)
    record = w.record
    if record.peak_process_bytes is None:
        assert any("NVML" in note for note in record.notes)
    else:
        assert record.peak_process_bytes > record.peak_reserved_bytes


def test_in_detail_peaks_of_phases_are_those_between_resets() -> None:
    model = make_model()
    step = stepping(model)
    step()
    with quiet(detailed=True) as w:
        for _ in range(3):
            step()
    phases = w.record.phases
    torch.cuda.reset_peak_memory_stats()
    step()
    whole = torch.cuda.max_memory_allocated()
    assert max(use.peak_allocated_bytes for use in phases.values()) == pytest.approx(whole, rel=0.01)
    assert {p: u.num_times for p, u in phases.items() if p != "other"} == {
        "load": 1,
        "forward": 3,
        "backward": 3,
        "optimizer": 3,
    }
    largest = w.record.largest
    accounted = sum(group.num_bytes for group in largest)
    assert accounted <= whole
    assert {"weights", "activations"} <= {group.category for group in largest}
    assert any(group.module.startswith("bert.encoder.layer.") for group in largest)


def test_a_leak_of_one_tensor_a_step_is_named() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    kept = []
    with quiet() as w:
        for _ in range(8):
            output = model(**make_batch(), output_hidden_states=True)
            output.loss.backward()
            optimizer.step()
            kept.append(output.hidden_states[-1].detach())  # leaked
    (found,) = (f for f in w.findings if f.check == "watch.tensors-pile-up")
    assert found.source.endswith(line_of("leaked"))
    assert found.num_bytes >= 6 * 16 * SEQ * 768 * 4


def test_a_leak_inside_a_module_is_named_in_detail() -> None:
    model = make_model()
    seen: list[torch.Tensor] = []
    layer = model.bert.encoder.layer[3]
    layer.register_forward_hook(lambda module, args, output: seen.append(output[0].detach() * 1.0))  # hoarded
    step = stepping(model)
    with quiet(detailed=True) as w:
        for _ in range(8):
            step()
    found = [f for f in w.findings if f.source.endswith(line_of("hoarded"))]
    assert found
    assert all(f.module.startswith("bert.encoder") for f in found)  # the layer's hook runs when the layer is done


def test_eval_without_no_grad_is_named_with_its_bytes() -> None:
    model = make_model().eval()
    batch = make_batch(32)
    with quiet() as w:
        for _ in range(4):
            model(**batch)  # graph kept
    (found,) = w.findings
    assert (found.check, found.module) == ("watch.eval-keeps-graph", "BertForSequenceClassification")
    assert found.source.endswith(line_of("graph kept"))
    assert found.num_bytes > 100 * MIB


def test_light_mode_costs_less_than_two_percent() -> None:
    model = make_model()
    step = stepping(model)
    watching = quiet()
    times: dict[str, list[float]] = {"plain": [], "watched": []}

    def timed() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(STEPS_A_ROUND):
            step()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    for index in range(NUM_PAIRS + NUM_WARM):
        plain = timed()
        with watching:
            step()  # models are found in the first pass
            watched = timed()
        if index >= NUM_WARM:
            times["plain"].append(plain)
            times["watched"].append(watched)
    overhead = median(b / a - 1 for a, b in zip(times["plain"], times["watched"], strict=True))
    assert overhead < MAX_OVERHEAD, f"{overhead:.2%}"


@pytest.mark.parametrize("detailed", [False, True])
def test_out_of_memory_is_reported_with_what_was_alive(detailed: bool) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    model = make_model()
    torch.cuda.set_per_process_memory_fraction(1500 * MIB / total)
    said = io.StringIO()
    w = watch(detailed=detailed, stream=said, plan_on_failure=True)

    @w
    def program() -> None:
        model(**make_batch(256))

    with pytest.raises(torch.OutOfMemoryError):
        program()
    report = w.record.out_of_memory[-1]
    assert report.phase == "forward"
    assert report.module.startswith("bert.")
    assert "out of memory in forward" in said.getvalue()
    assert "fits into" in said.getvalue() or "no settings" in said.getvalue()
    alive = sum(group.num_bytes for group in report.alive)
    assert alive == pytest.approx(report.allocated_bytes, rel=0.1)
    if detailed:
        assert report.operator
        assert any(g.module.startswith("bert.encoder.layer.") and g.operator for g in report.alive)
