"""The watch, on the emulated GPU: agreement with the allocator, habits by file and line, nothing left behind."""

import copy
import gc
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vramfit.emulator.gpu import EmulatedGPU
from vramfit.errors import VramfitError, WorkloadError
from vramfit.monitor.watch import Watch
from vramfit.records.codec import from_data, from_json, to_json
from vramfit.records.watch import MemoryFinding, WatchRecord
from vramfit.runtime.watching import watch

HERE = Path(__file__)
LINES = HERE.read_text().splitlines()


def line_of(marker: str) -> str:
    """file:line of the one line that ends with a marker."""
    found = [number for number, line in enumerate(LINES, start=1) if line.endswith(f"# {marker}")]
    assert len(found) == 1, marker
    return f"{HERE.name}:{found[0]}"


class Block(nn.Module):
    def __init__(self, size: int = 256) -> None:
        super().__init__()
        self.dense = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.dense(x))  # activation


class Hoarder(Block):
    """Keeps something of every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        self.seen.append(hidden.detach() * 2)  # hoarded
        return hidden


class Net(nn.Module):
    def __init__(self, first: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first, self.second, self.head = first(), Block(), nn.Linear(256, 2)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def samples(count: int = 256) -> torch.Tensor:
    return torch.randn(count, 256)


def train(model: nn.Module, steps: int = 8, keep: Callable[[torch.Tensor], None] = lambda loss: None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        loss = model(samples()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep(loss)


@pytest.fixture
def gpu() -> Iterator[EmulatedGPU]:
    torch.manual_seed(0)
    with EmulatedGPU(memory="1GiB") as made:
        yield made


@pytest.fixture(params=[False, True], ids=["light", "detailed"])
def detailed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def quiet(**keywords: Any) -> Watch:
    return watch(stream=io.StringIO(), plan_on_failure=False, **keywords)


def only(watching: Watch, check: str) -> MemoryFinding:
    found = [finding for finding in watching.findings if finding.check == check]
    assert len(found) == 1, [f.what for f in watching.findings]
    assert not [note for note in watching.record.notes if "missed" in note]
    return found[0]


def test_peaks_are_those_of_the_allocator(gpu: EmulatedGPU) -> None:
    with quiet() as w:
        train(Net())
    record = w.record
    assert record.device == "emulated"
    assert record.peak_requested_bytes == gpu.max_requested_bytes
    assert record.peak_allocated_bytes == gpu.max_allocated_bytes
    assert record.peak_reserved_bytes == gpu.max_reserved_bytes
    assert (record.num_steps, record.num_forwards) == (8, 8)
    assert record.samples[-1].allocated_bytes == gpu.allocated_bytes


def test_in_detail_peaks_of_phases_are_exact(gpu: EmulatedGPU) -> None:
    def program(after: Callable[[str], None]) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            batch = samples()
            after("other")
            loss = model(batch).square().mean()
            after("forward")
            loss.backward()
            after("backward")
            optimizer.step()
            after("optimizer")
            optimizer.zero_grad()

    by_hand: dict[str, int] = {}

    def measure(phase: str) -> None:
        by_hand[phase] = max(by_hand.get(phase, 0), gpu.max_allocated_bytes)
        gpu.reset_peaks()

    program(measure)
    with quiet(detailed=True) as w:
        program(lambda phase: None)
    phases = w.record.phases
    assert {p: phases[p].peak_allocated_bytes for p in ("backward", "optimizer")} == {
        p: by_hand[p] for p in ("backward", "optimizer")
    }
    # the gradient of what follows the model comes before the model's output gets its own
    assert by_hand["forward"] <= phases["forward"].peak_allocated_bytes <= by_hand["forward"] + 2**16


def test_phases_are_told_apart(gpu: EmulatedGPU, detailed: bool) -> None:
    with quiet(detailed=detailed) as w:
        model = Net()
        train(model, steps=5)
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model(samples())
    times = {phase: use.num_times for phase, use in w.record.phases.items()}
    assert times == {"load": 1, "forward": 5, "backward": 5, "optimizer": 5, "evaluation": 3, "other": 10}
    assert w.record.phases["load"].peak_requested_bytes < w.record.phases["forward"].peak_requested_bytes


def test_a_sound_program_has_no_findings_and_holds_no_more_than_without(gpu: EmulatedGPU, detailed: bool) -> None:
    def program() -> list[float]:
        model = Net()
        losses: list[float] = []
        train(model, steps=20, keep=lambda loss: losses.append(loss.item()))
        model.eval()
        predictions: list[float] = []
        with torch.no_grad():
            for _ in range(10):
                predictions += model(samples()).argmax(-1).tolist()
        return losses

    program()
    before = gpu.allocated_bytes
    with quiet(detailed=detailed) as w:
        program()
    assert w.findings == ()
    assert gpu.allocated_bytes == before


def test_eval_without_no_grad_is_named(gpu: EmulatedGPU, detailed: bool) -> None:
    model = Net().eval()
    with quiet(detailed=detailed) as w:
        for _ in range(4):
            model(samples(2048))  # eval pass
    found = only(w, "watch.eval-keeps-graph")
    assert found.module == "Net"
    assert found.source.endswith(line_of("eval pass"))
    assert found.num_bytes == pytest.approx(2 * 2048 * 256 * 4, rel=0.05)
    assert "no_grad" in found.fix


def test_eval_with_gradients_that_are_used_is_not_blamed(gpu: EmulatedGPU) -> None:
    model = Net().eval()
    with quiet() as w:
        for _ in range(4):
            model(samples(2048)).sum().backward()
    assert w.findings == ()


def test_losses_in_a_list_with_their_graph_are_named(gpu: EmulatedGPU, detailed: bool) -> None:
    losses: list[torch.Tensor] = []
    with quiet(detailed=detailed) as w:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(8):
            loss = model(samples()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)  # kept loss
    found = only(w, "watch.graphs-kept")
    assert found.source.endswith(line_of("kept loss"))
    assert "`losses`" in found.what
    assert ".item()" in found.fix


def test_a_running_sum_of_losses_is_named(gpu: EmulatedGPU) -> None:
    with quiet() as w:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        total: Any = 0
        for _ in range(8):
            loss = model(samples()).square().mean()
            loss.backward()
            optimizer.step()
            total += loss  # summed loss
    found = only(w, "watch.graphs-kept")
    assert found.source.endswith(line_of("summed loss"))
    assert "`total`" in found.what


@pytest.mark.parametrize("summed", [False, True], ids=["list", "sum"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_losses_kept_in_training_are_mended_there_though_an_evaluation_follows(
    gpu: EmulatedGPU, detailed: bool, summed: bool, epochs: int
) -> None:
    losses: list[torch.Tensor] = []
    total: Any = 0
    with quiet(detailed=detailed) as w:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(epochs):
            model.train()
            for _ in range(10):
                loss = model(samples()).square().mean()
                loss.backward()
                optimizer.step()
                if summed:
                    total += loss
                else:
                    losses.append(loss)
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(samples())
    found = only(w, "watch.graphs-kept")
    assert "loss.item()" in found.fix
    assert "more with every step" in found.what
    assert summed or f"holds {10 * epochs} tensors" in found.what


def test_outputs_with_graphs_kept_in_an_evaluation_after_training_are_mended_there(gpu: EmulatedGPU) -> None:
    outputs = []
    with quiet() as w:
        model = Net()
        train(model)
        model.eval()
        for _ in range(8):
            output = model(samples())
            outputs.append(output)
        model.train()
        train(model)
    found = only(w, "watch.graphs-kept")
    assert "torch.no_grad() around the evaluation" in found.fix


def test_logits_that_pile_up_in_evaluation_are_named(gpu: EmulatedGPU) -> None:
    model = Net().eval()
    logits = []
    with quiet() as w, torch.no_grad():
        for _ in range(8):
            output = model(samples(8192))
            logits.append(output)  # piled logits
    found = only(w, "watch.outputs-pile-up")
    assert found.source.endswith(line_of("piled logits"))
    assert found.num_bytes >= 7 * 8192 * 2 * 4
    assert ".cpu()" in found.fix


def test_a_tensor_kept_every_step_is_named_in_light_mode(gpu: EmulatedGPU) -> None:
    kept = []
    with quiet() as w:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(8):
            batch = samples()
            model(batch).sum().backward()
            optimizer.step()
            kept.append(batch)  # kept batch
    found = only(w, "watch.tensors-pile-up")
    assert found.source.endswith(line_of("kept batch"))
    assert found.num_bytes == pytest.approx(8 * 256 * 256 * 4, rel=0.3)


def test_a_leak_inside_a_module_is_named_with_module_and_line(gpu: EmulatedGPU) -> None:
    model = Net(first=Hoarder)
    with quiet(detailed=True) as w:
        train(model)
    found = only(w, "watch.leak")
    assert found.module == "first"
    assert found.source.endswith(line_of("hoarded"))
    assert "mul" in found.what
    assert found.num_bytes >= 6 * 256 * 256 * 4


@pytest.mark.parametrize("widths", [[512] * 4, [200, 180, 220, 190]])
def test_padding_to_the_limit_is_named_and_padding_to_the_longest_is_not(gpu: EmulatedGPU, widths: list[int]) -> None:
    model = Net()
    with quiet() as w:
        for width in widths:
            mask = torch.zeros(4, width, dtype=torch.long)
            mask[:, :180] = 1
            model(samples(4096), attention_mask=mask).sum().backward()  # padded batch
    if len(set(widths)) > 1:
        assert w.findings == ()
        return
    found = only(w, "watch.padding")
    assert found.source.endswith(line_of("padded batch"))
    assert "65%" in found.what
    assert found.num_bytes > 0


def test_light_mode_hooks_whole_models_only(gpu: EmulatedGPU) -> None:
    from torch.nn.modules import module as modules

    model = Net()
    with quiet() as w:
        train(model, steps=5)
        parts = []
        handle = model.second.register_forward_hook(lambda *_: parts.append(len(modules._global_forward_pre_hooks)))
        loss = model(samples()).sum()
        handle.remove()
        assert parts == [0], "no hook sees the parts of a model"
        assert not modules._global_forward_pre_hooks
        assert not modules._global_forward_hooks
        loss.backward()
        assert len(model._forward_hooks) == 1
        assert not any(part._forward_hooks for part in model.modules() if part is not model)
    assert w.record.num_forwards == 6
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_second_model_is_found_too(gpu: EmulatedGPU) -> None:
    teacher, student, loss_of = Net().eval(), Net(), nn.MSELoss()
    with quiet() as w:
        for _ in range(5):
            with torch.no_grad():
                wanted = teacher(samples())
            loss_of(student(samples()), wanted).backward()
    assert w.record.num_forwards == 10
    assert w.findings == ()


def test_a_model_is_copied_and_saved_while_it_is_watched(gpu: EmulatedGPU, tmp_path: Path) -> None:
    with quiet() as w:
        model = Net()
        train(model, steps=2)
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        assert b"vramfit.monitor" not in (tmp_path / "model.pt").read_bytes()
        read = torch.load(tmp_path / "model.pt", weights_only=False)
        for other in (twin, read):
            train(other, steps=2)
    assert (w.record.num_steps, w.record.num_forwards) == (6, 6)
    assert not [note for note in w.record.notes if "missed" in note]


def test_recomputation_in_backward_is_no_pass_of_its_own(gpu: EmulatedGPU, detailed: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
            return self.head(checkpoint(self.first, self.second(x), use_reentrant=False))

    with quiet(detailed=detailed) as w:
        train(Checkpointed(), steps=6)
    times = {phase: use.num_times for phase, use in w.record.phases.items()}
    assert times == {"load": 1, "forward": 6, "backward": 6, "optimizer": 6, "other": 12}
    assert w.findings == ()


def test_nothing_is_left_behind(gpu: EmulatedGPU, detailed: bool) -> None:
    from torch.nn.modules import module as modules
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    depth = len(_get_current_dispatch_mode_stack())

    @quiet(detailed=detailed)
    def program() -> None:
        train(Net(), steps=2)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert not modules._global_forward_pre_hooks
    assert not modules._global_forward_hooks
    assert len(_get_current_dispatch_mode_stack()) == depth


def test_out_of_memory_tells_what_was_alive_before_the_error_goes_on(detailed: bool) -> None:
    said = io.StringIO()
    w = watch(detailed=detailed, stream=said, plan_on_failure=False)

    @w
    def program() -> None:
        model = Net()
        model(samples(8192))

    with EmulatedGPU(memory="24MiB"), pytest.raises(torch.OutOfMemoryError):
        program()
    report = w.record.out_of_memory[-1]
    assert (report.phase, report.step) == ("forward", 0)
    assert report.source.endswith(line_of("activation"))
    assert report.module == "first"
    assert {"weights"} < {group.category for group in report.alive}
    if detailed:
        assert report.operator == "relu"
        alive = sum(group.num_bytes for group in report.alive)
        assert alive == pytest.approx(report.allocated_bytes, rel=0.01)
        assert ("activations", "first.dense", "addmm") in {(g.category, g.module, g.operator) for g in report.alive}
    else:
        assert any(g.operator == "[8192, 256] float32" and g.num_tensors >= 2 for g in report.alive)
    assert "out of memory in forward" in said.getvalue()
    assert report.remedies
    assert all(f"→ {remedy}" in said.getvalue() for remedy in report.remedies)


def test_memory_filled_by_a_habit_names_the_habit() -> None:
    said, outputs = io.StringIO(), []

    @watch(stream=said, plan_on_failure=False)
    def program() -> None:
        model = Net().eval()
        for _ in range(20):
            output = model(samples(1024))
            outputs.append(output)  # filled up

    with EmulatedGPU(memory="40MiB"), pytest.raises(torch.OutOfMemoryError):
        program()
    assert line_of("filled up") in said.getvalue()
    assert "torch.no_grad()" in said.getvalue()


def test_an_evaluation_pass_whose_graph_alone_is_too_much_is_named(detailed: bool) -> None:
    said = io.StringIO()

    @watch(detailed=detailed, stream=said, plan_on_failure=False)
    def program() -> None:
        model = Net().eval()
        model(samples(8192))  # one pass too much

    with EmulatedGPU(memory="24MiB"), pytest.raises(torch.OutOfMemoryError):
        program()
    assert f"{line_of('one pass too much')} in Net: Net ran in eval() with gradients on" in said.getvalue()


def test_an_error_that_is_caught_inside_is_kept_but_not_announced() -> None:
    said = io.StringIO()
    with EmulatedGPU(memory="24MiB"), watch(detailed=True, stream=said) as w:
        with pytest.raises(torch.OutOfMemoryError):
            Net()(samples(1 << 16))
        Net()(samples(16))
    assert said.getvalue() == ""
    assert len(w.record.out_of_memory) == 1
    assert w.record.num_ooms == 1


@pytest.mark.slow
def test_a_program_that_deals_with_the_error_itself_can_ask_what_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramfit.monitor.watch.MAX_REPORTS", 1)
    stream = io.StringIO()
    with EmulatedGPU(memory="24MiB"), watch(stream=stream) as w:
        model, held = Net(), torch.zeros(2**20)
        for _ in range(2):
            gc.collect()  # what the last pass left
            try:
                model(torch.zeros(8192, 256))
            except torch.OutOfMemoryError as error:
                report = w.capture(error, model=model)
        assert report is not None
        assert report.module == "first"
        assert {group.operator: group.num_bytes for group in report.alive}["[1048576] float32"] == held.nbytes
        assert "weights" in {group.category for group in report.alive}
    assert w.record.out_of_memory == (report,)  # the last of two
    assert stream.getvalue() == ""


def test_an_error_that_was_explained_already_is_not_announced() -> None:
    class Explained(VramfitError, torch.OutOfMemoryError):
        """As integrations raise it."""

    stream = io.StringIO()
    with EmulatedGPU(memory="16MiB"), pytest.raises(Explained), watch(stream=stream):
        raise Explained("out of memory, and why")
    assert stream.getvalue() == ""


def test_a_model_of_transformers_gets_the_plan_that_fits() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
    said = io.StringIO()
    w = watch(stream=said)

    @w
    def program() -> None:
        model = BertForSequenceClassification(config).train()
        ids = torch.randint(0, 1000, (64, 128))
        model(input_ids=ids, attention_mask=torch.ones_like(ids))

    with EmulatedGPU(memory="150MiB"), pytest.raises(torch.OutOfMemoryError):
        program()
    assert re.search(r"batch 64 × 128 of BertFor\w+ fits into 150.00 MiB with passes of \d+", said.getvalue())
    assert w.record.out_of_memory[-1].module.startswith("bert.encoder.layer.")


def test_samples_go_to_json_lines_and_prometheus(gpu: EmulatedGPU, tmp_path: Path) -> None:
    lines, metrics = tmp_path / "watch.jsonl", tmp_path / "watch.prom"
    model = Net().eval()
    seen: list[WatchRecord] = []
    with quiet(jsonl=lines, prometheus=metrics, interval_s=0.05, on_sample=seen.append) as w:
        for _ in range(6):
            model(samples(4096))
    read = [json.loads(line) for line in lines.read_text().splitlines()]
    kinds = [entry.pop("type") for entry in read]
    assert kinds[-1] == "watch"
    assert {"sample", "finding"} < set(kinds)
    assert from_data(WatchRecord, read[-1]).findings == w.findings
    assert seen[-1].device == "emulated"
    text = metrics.read_text()
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) .+|[a-z_]+\{[^}]+\} [0-9.e+-]+", line), line
    assert f'vramfit_peak_memory_bytes{{device="emulated",kind="allocated"}} {gpu.max_allocated_bytes}' in text


def test_a_record_is_saved_and_read_back(gpu: EmulatedGPU) -> None:
    with quiet(detailed=True) as w:
        train(Net(first=Hoarder), steps=4)
    assert from_json(WatchRecord, to_json(w.record)) == w.record
    assert w.record.largest[0].num_bytes > 0


def test_it_decorates_functions_and_counts_on(gpu: EmulatedGPU) -> None:
    watching = quiet()

    @watching
    def program() -> str:
        train(Net(), steps=2)
        return "done"

    assert (program(), program()) == ("done", "done")
    assert watching.record.num_steps == 4


def test_wrong_use_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="interval_s"):
        watch(interval_s=0.001)
    with pytest.raises(VramfitError, match="cannot write"), watch(jsonl=tmp_path / "no" / "folder"):
        pass
    with quiet() as w, pytest.raises(VramfitError, match="running already"), w:
        pass


def test_without_a_gpu_it_works_and_says_what_is_missing() -> None:
    with quiet(detailed=True) as w:
        train(Net(), steps=3)
    record = w.record
    assert record.device == "cpu"
    assert record.peak_allocated_bytes is None
    assert record.peak_requested_bytes > 3 * 256 * 256 * 4
    assert record.peak_process_bytes > 0
    assert any("no GPU" in note for note in record.notes)


def test_outputs_kept_on_the_host_are_where_they_belong() -> None:
    model = Net().eval()
    logits = []
    with quiet() as w, torch.no_grad():
        for _ in range(8):
            output = model(samples(8192))
            logits.append(output.cpu())
    assert w.findings == ()


def test_a_gpu_that_comes_into_use_later_is_followed(detailed: bool) -> None:
    with quiet(detailed=detailed, interval_s=0.05) as w:
        before = torch.ones(1 << 20)
        assert w.sample().allocated_bytes is None
        with EmulatedGPU(memory="1GiB") as gpu:
            train(Net(), steps=3)
    record = w.record
    assert (record.device, record.capacity_bytes) == ("emulated", 2**30)
    assert record.peak_allocated_bytes == gpu.max_allocated_bytes or detailed
    assert not [note for note in record.notes if "missed" in note]
    assert before.numel() == 1 << 20


def test_the_stepper_recovers_under_it() -> None:
    from vramfit.loader.load import load
    from vramfit.runtime.stepper import Stepper

    batch = {
        "input_ids": torch.randint(1000, 2000, (8, 32)),
        "attention_mask": torch.ones(8, 32, dtype=torch.long),
        "labels": torch.randint(0, 2, (8,)),
    }
    with EmulatedGPU(memory="1GiB", fail_at=[880]), quiet(detailed=True) as w:
        model, _ = load("bert-tiny", random_weights=True, device="cpu")
        stepper = Stepper(model.train(), torch.optim.AdamW(model.parameters()), micro_batch=4, seq=32)
        for _ in range(4):
            stepper.step(batch)
    assert stepper.num_recoveries == 1
    assert w.record.num_steps == 4
    assert w.record.num_ooms == 1
    assert len(w.record.out_of_memory) == 1


def test_losses_in_a_list_whose_graphs_backward_retains_are_named_with_both_lines(
    gpu: EmulatedGPU, detailed: bool
) -> None:
    losses: list[torch.Tensor] = []
    with quiet(detailed=detailed) as w:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        held = []
        for _ in range(8):
            loss = model(samples()).square().mean()
            loss.backward(retain_graph=True)  # retained
            optimizer.step()
            losses.append(loss)  # kept with its activations
            held.append(gpu.requested_bytes)
    assert [f.check for f in w.findings] == ["watch.graphs-retained"]
    found = only(w, "watch.graphs-retained")
    assert found.source.endswith(line_of("kept with its activations"))
    assert "`losses` keeps the graphs of 8 forward passes" in found.what
    assert line_of("retained") in found.what
    assert "drop retain_graph=True" in found.fix
    assert "loss.detach() or loss.item() in `losses`" in found.fix
    assert found.num_bytes == pytest.approx(8 * (held[-1] - held[0]) / 7, rel=0.01)


def test_retained_graphs_are_named_inside_dictionaries_and_objects_and_with_evaluations_in_between(
    gpu: EmulatedGPU,
) -> None:
    class Meter:
        def __init__(self) -> None:
            self.history: dict[str, list[torch.Tensor]] = {"loss": []}

    meter = Meter()
    with quiet() as w:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(8):
            loss = model(samples()).square().mean()
            (loss * 2).backward(retain_graph=True)  # as a scaler does
            optimizer.step()
            meter.history["loss"].append(loss)  # deep inside
            model.eval()
            with torch.no_grad():
                model(samples())
            model.train()
    found = only(w, "watch.graphs-retained")
    assert "`meter.history['loss']`" in found.what
    assert found.source.endswith(line_of("deep inside"))


def test_graphs_that_a_second_backward_frees_are_not_called_retained(gpu: EmulatedGPU) -> None:
    losses: list[torch.Tensor] = []
    before = torch.Tensor.backward, torch.autograd.backward
    with quiet() as w:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(8):
            loss = model(samples()).square().mean()
            loss.backward(retain_graph=True)
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss)
    assert "watch.graphs-retained" not in [f.check for f in w.findings]
    assert (torch.Tensor.backward, torch.autograd.backward) == before


def test_graphs_that_nobody_keeps_are_not_called_retained(gpu: EmulatedGPU) -> None:
    with quiet() as w:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(8):
            loss = model(samples()).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
    assert not w.findings


def test_losses_in_a_list_are_named_though_an_evaluation_follows_every_step(gpu: EmulatedGPU) -> None:
    losses: list[torch.Tensor] = []
    with quiet() as w:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(8):
            loss = model(samples()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
            model.eval()
            with torch.no_grad():
                model(samples())
            model.train()
    assert "`losses`" in only(w, "watch.graphs-kept").what
