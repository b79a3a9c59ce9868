"""Forward passes over a data set: every sample once, in any memory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.runtime.stateful import Counter
from tests.unit.runtime.training.conftest import one_thread  # noqa: F401
from tests.unit.runtime.training.small_runs import write_classes, write_model, write_tags

from vramfit.errors import RecoveryExhausted, WorkloadError
from vramfit.runtime import trained as trained_models
from vramfit.runtime.data import samples as samples_module
from vramfit.runtime.data.source import DataSource
from vramfit.runtime.device import RunDevice
from vramfit.runtime.inference import Inference, even_tokens, group_by_length
from vramfit.runtime.trained import open_model
from vramfit.techniques import packing


def test_batches_hold_to_the_tokens_and_begin_with_the_longest() -> None:
    lengths = [5, 30, 7, 7, 12, 30, 2]
    groups = group_by_length(lengths, 40)
    assert sorted(i for group in groups for i in group) == list(range(7))
    assert groups[0] == [1]
    assert all(len(g) == 1 or len(g) * max(lengths[i] for i in g) <= 40 for g in groups)


def test_a_batch_that_failed_leaves_no_trace_in_the_models_own_state(opened: Any) -> None:
    """A counter goes on in evaluation mode; only batches that went through count."""
    counter = Counter()
    opened[0].base_model.embeddings.dropout = counter
    for place in (30, 60):
        counter.num_calls, seen = 0, []
        inference = Inference(opened[0], RunDevice("emulated", memory="1GiB", fail_at=(place,)), max_tokens=512)
        inference.run(opened[1], lambda output, batch, rows, seen=seen: seen.append(rows))
        assert inference.num_recoveries == 1
        assert counter.num_calls == len(seen)


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    write_model(tmp_path / "m")
    trained = open_model(str(tmp_path / "m"), task="sequence-classification")
    data = write_classes(tmp_path / "d.csv", num_rows=30)
    samples = trained.read(DataSource(path=str(data), task="sequence-classification", needs_labels=False))
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(tmp_path / "m"), samples


def logits_of(opened: Any, run_device: RunDevice, max_tokens: int) -> tuple[torch.Tensor, Inference]:
    model, samples = opened
    found = torch.zeros(len(samples), 2)

    def take(output: Any, batch: Any, rows: list[int]) -> None:
        found[torch.tensor(rows)] = output.logits

    inference = Inference(model, run_device, max_tokens=max_tokens)
    inference.run(samples, take)
    return found, inference


def test_memory_that_runs_out_halves_the_batch_and_loses_nothing(opened: Any) -> None:
    plain, _ = logits_of(opened, RunDevice("cpu"), 16)
    disturbed, inference = logits_of(opened, RunDevice("emulated", memory="1GiB", fail_at=(60, 200)), 512)
    assert inference.num_recoveries == 2
    assert inference.max_tokens == 128
    assert torch.allclose(plain, disturbed, atol=1e-6)
    assert opened[0].training is False


def test_one_sample_that_does_not_fit_is_an_error(opened: Any) -> None:
    with pytest.raises(RecoveryExhausted, match="one sample of"):
        logits_of(opened, RunDevice("emulated", memory="16KiB"), 64)


def test_packed_batches_hold_more_and_answer_the_same(opened: Any) -> None:
    plain, _ = logits_of(opened, RunDevice("cpu"), 64)
    packing.apply(opened[0], "sequence-classification")
    packed, _ = logits_of(opened, RunDevice("cpu"), 64)
    torch.testing.assert_close(packed, plain, atol=1e-6, rtol=1e-5)
    lengths = [9, 1, 1, 1, 1, 1]
    assert len(group_by_length(lengths, 14, packs=True)) < len(group_by_length(lengths, 14))


def test_packed_answers_for_tokens_are_as_wide_as_their_batch(tmp_path: Path) -> None:
    """Batches are wider than their longest sample: by multiples of 8, up to the widest there is."""
    from transformers import AutoModelForTokenClassification

    write_model(tmp_path / "m")
    trained = open_model(str(tmp_path / "m"), task="token-classification")
    data = write_tags(tmp_path / "d.jsonl")
    samples = trained.read(DataSource(path=str(data), task="token-classification", needs_labels=False))
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "m")
    packing.apply(model, "token-classification")
    seen: list[tuple[Any, Any, int]] = []

    def take(output: Any, batch: Any, rows: list[int]) -> None:
        longest = max(samples.lengths[i] for i in rows)
        seen.append((output.logits.shape[:2], batch["attention_mask"].shape, longest))

    Inference(model, RunDevice("cpu"), max_tokens=14).run(samples, take)
    assert any(longest < width for _, (_, width), longest in seen)
    assert all(logits == mask for logits, mask, _ in seen)


def test_a_part_is_read_while_another_goes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "PART_ROWS", 7)
    write_model(tmp_path / "m")
    trained = open_model(str(tmp_path / "m"), task="sequence-classification")
    data = write_classes(tmp_path / "d.csv", num_rows=30)
    source = DataSource(path=str(data), task="sequence-classification", needs_labels=False)
    whole, parts = trained.read(source), list(trained.read_ahead(source))
    assert [len(part) for part in parts] == [7, 7, 7, 7, 2]
    assert [r for part in parts for r in part.references] == whole.references
    assert [n for part in parts for n in part.lengths] == list(whole.lengths)


def test_parts_give_what_the_whole_gives(opened: Any) -> None:
    plain, _ = logits_of(opened, RunDevice("cpu"), 64)
    model, samples = opened
    packing.apply(model, "sequence-classification")
    found: list[torch.Tensor] = []

    def take(part: Any, output: Any, batch: Any, rows: list[int]) -> None:
        assert part is samples
        found.append(output.logits[torch.tensor(rows).argsort()])

    Inference(model, RunDevice("cpu"), max_tokens=10_000).run_parts([samples, samples], take)
    assert len(found) == 2
    for made in found:
        torch.testing.assert_close(made, plain, atol=1e-6, rtol=1e-5)


def test_packed_rows_are_about_as_full_as_each_other() -> None:
    lengths = [30, 20, 10] * 20
    groups = group_by_length(lengths, even_tokens(lengths, 500), packs=True)
    tokens = [sum(lengths[i] for i in group) for group in groups]
    assert len(groups) == 3
    assert min(tokens) > 0.8 * max(tokens)
    assert max(tokens) <= 500


def test_fused_layers_are_taken_only_where_asked_for_and_packed(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr(trained_models, "can_fuse", lambda model, workload, device: True)
    trained = open_model(str(tmp_path / "m"), task="sequence-classification")
    gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    assert "fused" not in trained.suited(gpu, precision="bf16", fused=False)
    assert trained.suited(gpu, precision="bf16", fused=True)["fused"]
    for run_device, precision in ((gpu, "fp32"), (SimpleNamespace(device=torch.device("cpu")), "bf16")):
        with pytest.raises(WorkloadError, match="fused is for packed batches"):
            trained.suited(run_device, precision=precision, fused=True)


@pytest.mark.parametrize(
    ("device", "precision", "asked", "chosen"),
    [
        ("cuda", "bf16", None, "packed"),
        ("cuda", "amp-fp16", None, "packed"),
        ("cuda", "bf16", "sdpa", "sdpa"),
        ("cuda", "fp32", None, None),
        ("cpu", "bf16", None, None),
        ("cpu", "fp32", "packed", "packed"),
    ],
)
def test_packed_is_taken_where_its_kernel_is(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, precision: str, asked: Any, chosen: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    run_device: Any = SimpleNamespace(device=torch.device(device))
    trained = open_model(str(tmp_path / "m"), task="sequence-classification")
    given = {"precision": precision, "attention": asked}
    assert trained.suited(run_device, **given) == given | {"attention": chosen}
    assert trained.suited(run_device, **given, gpu="t4")["attention"] == asked
    words = open_model(str(tmp_path / "m"), task="masked-lm")
    assert "attention" not in words.suited(run_device, precision=precision)
    with pytest.raises(WorkloadError, match="every word"):
        words.suited(run_device, precision=precision, attention="packed")
