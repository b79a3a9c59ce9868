"""`vramfit.load` on checkpoints of every shape, beside transformers; and everything it refuses."""

import errno
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.loader.checkpoints import (
    edit_config,
    logits,
    rewrite,
    tiny_batch,
    tiny_config,
    to_pickle,
    write,
    write_encoder,
    write_masked_lm,
)
from tests.unit.models.sentence_folders import write_dense, write_folder
from transformers import AutoModelForMaskedLM, BertForMaskedLM, BertForSequenceClassification, BertModel

import vramfit
from vramfit.errors import CheckpointError, MissingExtra, NoPlanFits, WorkloadError
from vramfit.loader.load import load
from vramfit.techniques import offloading
from vramfit.units import format_bytes
from vramfit.workload import Workload


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def test_a_single_file_loads_as_it_was_saved(folder: Path) -> None:
    saved = write(folder)
    ours, report = vramfit.load(folder, device="cpu")
    assert torch.equal(logits(ours, tiny_batch()), logits(saved, tiny_batch()))
    assert report.num_bytes == sum(p.numel() * 4 for p in saved.parameters())


def test_the_time_of_a_load_leaves_imports_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To resolve a model is what imports the code of its class: seconds, the first time in a process."""
    write(folder)
    clock = [0.0]
    module = import_module("vramfit.models.resolve")
    resolve = module.resolve

    def slow(*arguments: Any, **keywords: Any) -> Any:
        clock[0] += 100.0
        return resolve(*arguments, **keywords)

    monkeypatch.setattr(module, "resolve", slow)
    monkeypatch.setattr("vramfit.loader.load.time.perf_counter", lambda: clock[0])
    _, report = load(folder, device="cpu")
    assert clock[0] == 100.0
    assert report.time_s == 0.0


def test_shards_load_like_one_file(folder: Path) -> None:
    saved = write(folder, max_shard_size="60KB")
    ours, report = load(folder, device="cpu")
    assert len(report.files) > 2
    assert torch.equal(logits(ours, tiny_batch()), logits(saved, tiny_batch()))


def test_a_pickle_loads_without_running_anything(folder: Path) -> None:
    saved = write(folder)
    to_pickle(folder)
    ours, report = load(folder, device="cpu")
    assert report.files == ("pytorch_model.bin",)
    assert torch.equal(logits(ours, tiny_batch()), logits(saved, tiny_batch()))


def test_a_pickle_of_old_torch_loads_too(folder: Path) -> None:
    saved = write(folder)
    to_pickle(folder)
    file = folder / "pytorch_model.bin"
    torch.save(torch.load(file, weights_only=True), file, _use_new_zipfile_serialization=False)
    ours, _ = load(folder, device="cpu")
    assert torch.equal(logits(ours, tiny_batch()), logits(saved, tiny_batch()))


def test_tied_weights_come_once_and_stay_tied(folder: Path) -> None:
    saved = write_masked_lm(folder)
    ours, _ = load(folder, task="masked-lm", device="cpu")
    assert ours.cls.predictions.decoder.weight is ours.bert.embeddings.word_embeddings.weight
    assert ours.cls.predictions.decoder.bias is ours.cls.predictions.bias
    assert torch.equal(logits(ours, tiny_batch()), logits(saved, tiny_batch()))


def test_tied_weights_that_differ_in_the_checkpoint_are_left_apart_as_transformers_does(folder: Path) -> None:
    write_masked_lm(folder)
    other = torch.randn(200, 64, generator=torch.Generator().manual_seed(9))
    rewrite(folder, lambda tensors: tensors | {"cls.predictions.decoder.weight": other})
    ours, _ = load(folder, task="masked-lm", device="cpu")
    theirs = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(ours.cls.predictions.decoder.weight, other)
    assert torch.equal(logits(ours, tiny_batch()), logits(theirs, tiny_batch()))


def test_a_pickle_with_both_names_of_a_tied_weight_stays_tied(folder: Path) -> None:
    write_masked_lm(folder)
    rewrite(
        folder,
        lambda t: t | {"cls.predictions.decoder.weight": t["bert.embeddings.word_embeddings.weight"].clone()},
    )
    to_pickle(folder)
    ours, _ = load(folder, task="masked-lm", device="cpu")
    assert ours.cls.predictions.decoder.weight is ours.bert.embeddings.word_embeddings.weight


def test_old_names_of_norms_are_understood(folder: Path) -> None:
    saved = write(folder)
    rewrite(
        folder,
        lambda tensors: {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in tensors.items()
        },
    )
    ours, report = load(folder, device="cpu")
    assert report.renamed["bert.embeddings.LayerNorm.gamma"] == "bert.embeddings.LayerNorm.weight"
    assert torch.equal(logits(ours, tiny_batch()), logits(saved, tiny_batch()))


def test_an_encoder_loads_into_a_model_with_a_head(folder: Path) -> None:
    saved = write_encoder(folder)
    ours, report = load(folder, device="cpu")
    assert set(report.fresh) == {"classifier.weight", "classifier.bias"}
    assert torch.equal(logits(ours.bert, tiny_batch()), logits(saved, tiny_batch()))


def test_a_model_with_a_head_loads_into_an_encoder(folder: Path) -> None:
    saved = write(folder)
    ours, report = load(folder, task="features", device="cpu")
    assert isinstance(ours, BertModel)
    assert set(report.dropped) == {"classifier.weight", "classifier.bias"}
    assert torch.equal(logits(ours, tiny_batch()), logits(saved.bert, tiny_batch()))


def test_a_pretraining_head_is_dropped_for_another_task(folder: Path) -> None:
    write_masked_lm(folder)
    _, report = load(folder, device="cpu")
    assert any(name.startswith("cls.predictions") for name in report.dropped)
    assert "classifier.weight" in report.fresh


def test_another_number_of_labels_means_a_new_head(folder: Path) -> None:
    write(folder)
    ours, report = load(folder, num_labels=5, device="cpu")
    assert ours.classifier.out_features == 5
    assert "classifier.weight" in report.fresh


def test_half_precision_files_become_full_precision_when_asked(folder: Path) -> None:
    saved = write(folder)
    rewrite(folder, lambda tensors: {name: tensor.half() for name, tensor in tensors.items()})
    ours, _ = load(folder, device="cpu")
    assert ours.bert.pooler.dense.weight.dtype is torch.float32
    assert torch.equal(ours.bert.pooler.dense.weight, saved.bert.pooler.dense.weight.half().float())


@pytest.mark.parametrize("precision", ["tf32", "amp-bf16", "amp-fp16"])
def test_precisions_that_compute_lower_keep_full_weights(folder: Path, precision: str) -> None:
    write(folder)
    assert load(folder, precision=precision, device="cpu")[0].dtype is torch.float32


def test_attention_is_the_one_asked_for(folder: Path) -> None:
    write(folder)
    assert load(folder, attention="eager", device="cpu")[0].config._attn_implementation == "eager"
    assert load(folder, device="cpu")[0].config._attn_implementation == "sdpa"


def test_progress_counts_every_byte(folder: Path) -> None:
    write(folder)
    seen: list[tuple[int, int]] = []
    _, report = load(folder, device="cpu", progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, report.num_bytes)
    assert seen[-1] == (report.num_bytes, report.num_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_random_weights_need_no_checkpoint_and_are_the_same_every_time() -> None:
    first, report = load("bert-tiny", random_weights=True, device="cpu")
    second, _ = load("bert-tiny", random_weights=True, device="cpu", precision="bf16")
    assert isinstance(first, BertForSequenceClassification)
    assert (report.files, report.num_bytes) == ((), 0)
    weight = first.bert.encoder.layer[0].output.dense.weight
    assert torch.equal(weight.bfloat16(), second.bert.encoder.layer[0].output.dense.weight)
    assert 0.015 < weight.std() < 0.025
    assert torch.equal(first.bert.embeddings.position_ids[0], torch.arange(512))


def test_a_new_head_follows_the_seed_and_nothing_else_does(folder: Path) -> None:
    write_encoder(folder)
    usual, zero, one, again = (load(folder, device="cpu", **how)[0] for how in ({}, {"seed": 0}, *[{"seed": 1}] * 2))
    assert torch.equal(usual.classifier.weight, zero.classifier.weight)
    assert torch.equal(one.classifier.weight, again.classifier.weight)
    assert not torch.equal(zero.classifier.weight, one.classifier.weight)
    layers = zip(zero.bert.encoder.parameters(), one.bert.encoder.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in layers)
    generated = torch.get_rng_state()
    load(folder, device="cpu", seed=2)
    assert torch.equal(torch.get_rng_state(), generated)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(WorkloadError, match="seed"):
        load("bert-tiny", random_weights=True, device="cpu", seed=seed)


def test_random_weights_of_a_configuration_keep_their_ties() -> None:
    model, _ = load(tiny_config(), task="masked-lm", random_weights=True, device="cpu")
    assert isinstance(model, BertForMaskedLM)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


def test_a_name_without_weights_says_what_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.snapshot_download", _offline)
    with pytest.raises(CheckpointError) as caught:
        load("bert-base-uncased", device="cpu")
    assert caught.value.hint is not None
    assert "--random-weights" in caught.value.hint


def _offline(*_: object, **__: object) -> str:
    raise ConnectionError("no network")


def test_a_hub_id_is_fetched_without_pickles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = write(folder)
    asked: list[list[str]] = []

    def snapshot(hub_id: str, *, allow_patterns: list[str]) -> str:
        assert hub_id == "google-bert/bert-base-uncased"
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    ours, _ = load("bert-base-uncased", device="cpu")
    assert torch.equal(logits(ours, tiny_batch()), logits(saved, tiny_batch()))
    assert len(asked) == 1
    assert not any("bin" in pattern for pattern in asked[0])


def test_a_dense_layer_on_the_hub_is_fetched_as_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, "Dense")
    asked: list[list[str]] = []

    def snapshot(hub_id: str, *, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        if "?_Dense/pytorch_model.bin" in allow_patterns:
            write_dense(tmp_path, pickled=True)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    load("bert-tiny", task="embedding", device="cpu")
    assert len(asked) == 1
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    _, report = load("bert-tiny", task="embedding", device="cpu")
    assert len(asked) == 3
    assert report.files == ("model.safetensors", "2_Dense/pytorch_model.bin")


def test_a_model_object_is_refused() -> None:
    with pytest.raises(WorkloadError, match="a model already"):
        load(BertModel(tiny_config()), device="cpu")


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        ({"quantize": "fp16"}, "quantize 'fp16' is not one of int8, int8-dynamic, int4"),
        ({"precision": "float16"}, "precision 'float16' is not one of .*nearest: "),
        ({"task": "classify"}, "task 'classify' is not one of .*nearest: "),
        ({"offload": "activations"}, "offload weights"),
        ({"offload": "weights"}, "needs memory"),
        ({"device": "gpu"}, "device 'gpu'"),
        ({"device": "cuda:97"}, "cuda:97"),
        ({"quantize": "int4"}, "int4 needs"),
    ],
)
def test_what_cannot_be_followed_is_a_workload_error(keywords: dict[str, str], problem: str) -> None:
    if keywords.get("quantize") == "int4":
        pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')
    with pytest.raises(WorkloadError, match=problem):
        load("bert-tiny", random_weights=True, **({"device": "cpu"} | keywords))


def test_quantizing_without_torchao_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramfit.techniques import quantization

    def absent(name: str) -> None:
        raise ImportError(name)

    quantization._torchao.cache_clear()
    monkeypatch.setattr(quantization, "import_module", absent)
    with pytest.raises(MissingExtra) as caught:
        load("bert-tiny", random_weights=True, quantize="int8", device="cpu")
    assert caught.value.hint == 'pip install "vramfit[train]"'


def test_a_torchao_that_is_too_old_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramfit.techniques import quantization

    quantization._torchao.cache_clear()
    monkeypatch.setattr(quantization, "import_module", lambda name: SimpleNamespace(__version__="0.17.0"))
    with pytest.raises(MissingExtra, match=r"torchao 0\.18 or newer"):
        load("bert-tiny", random_weights=True, quantize="int8", device="cpu")


def test_weights_beyond_the_budget_are_refused_before_anything_moves() -> None:
    with pytest.raises(NoPlanFits) as caught:
        load("bert-tiny", random_weights=True, memory="4MiB", device="cpu")
    assert caught.value.shortfall_bytes > 10**6
    assert "4.00 MiB are allowed" in str(caught.value)


@pytest.mark.parametrize("task", ["sequence-classification", "masked-lm"])
def test_what_would_help_is_said_in_figures_of_the_model(task: str) -> None:
    pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')
    keywords: dict[str, Any] = {"task": task, "random_weights": True, "device": "cpu"}
    with pytest.raises(NoPlanFits) as caught:
        load("bert-mini", memory="1MiB", **keywords)
    for change, words in (
        ({"precision": "bf16"}, "with precision bf16"),
        ({"quantize": "int8"}, "with quantize int8"),
        ({"precision": "bf16", "quantize": "int8"}, "with both"),
    ):
        model, _ = load("bert-mini", **keywords, **change)
        assert f"{format_bytes(offloading.model_bytes(model))} {words}" in str(caught.value.hint)
    assert "offload weights keeps" in str(caught.value.hint)


def test_a_plan_decides_what_it_speaks_of(folder: Path) -> None:
    @dataclass
    class Plan:
        workload: Workload

    write(folder)
    plan = Plan(Workload(model="m", task="features", precision="bf16", offload="optimizer", loop="stepper"))
    model, report = load(folder, plan=plan, device="cpu")
    assert isinstance(model, BertModel)
    assert report.precision == "bf16"


def test_a_plan_that_offloads_gives_the_weights_their_share_of_its_memory() -> None:
    workload = Workload(model="m", mode="infer", batch=4, offload="weights", memory="1GiB")
    plan = SimpleNamespace(workload=workload, estimate=SimpleNamespace(breakdown={"weights": 40 * 2**20}))
    _, report = load("bert-mini", plan=plan, random_weights=True, device="cpu")
    assert report.num_resident_layers < report.num_layers


def test_a_training_plan_that_offloads_loads_into_host_memory() -> None:
    workload = Workload(
        model="m", offload="weights", loop="stepper", checkpointing="full", memory="1MiB", optimizer="adamw-fused"
    )
    model, report = load("bert-tiny", plan=SimpleNamespace(workload=workload), random_weights=True, device="cuda")
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert report.num_resident_layers == report.num_layers


def test_a_truncated_file_is_refused_by_name(folder: Path) -> None:
    write(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError) as caught:
        load(folder, device="cpu")
    assert caught.value.file == str(file)


def test_a_file_that_shrinks_after_its_inspection_is_a_checkpoint_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vramfit.loader import model as making

    write(folder)
    initialise = making.initialise

    def cut_meanwhile(model: torch.nn.Module, fresh: set[str], seed: int) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
        initialise(model, fresh, seed)

    monkeypatch.setattr(making, "initialise", cut_meanwhile)
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        load(folder, device="cpu")
    assert caught.value.tensor


def test_a_failure_half_way_leaves_an_empty_model(folder: Path) -> None:
    write(folder)
    calls = 0

    def interrupt(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        load(folder, device="cpu", progress=interrupt)
    frames = [entry.frame.f_locals.get("model") for entry in caught.traceback]
    held = [m for m in frames if isinstance(m, torch.nn.Module)]
    assert calls > 1
    assert held
    assert not any(list(m.parameters()) or list(m.buffers()) for m in held)


def test_everything_fatal_is_said_at_once(folder: Path) -> None:
    write(folder)
    edit_config(folder, hidden_size=32, num_hidden_layers=6)
    with pytest.raises(CheckpointError) as caught:
        load(folder, device="cpu")
    assert caught.value.hint


@pytest.mark.parametrize("quantize", ["int8", "int8-dynamic"])
def test_a_new_head_is_not_quantized_whatever_its_size_and_learns(folder: Path, quantize: str) -> None:
    pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')
    write_masked_lm(folder)  # neither a classifier nor a pooler
    model, report = load(folder, quantize=quantize, num_labels=8, device="cpu")
    assert {"classifier.weight", "bert.pooler.dense.weight"} <= set(report.fresh)
    for name in report.fresh:
        parameter = model.get_parameter(name)
        assert type(parameter) is torch.nn.Parameter
        assert parameter.requires_grad
        assert parameter.dtype is torch.float32
    assert report.num_quantized == 4 * 6


def test_what_is_predicted_to_be_quantized_is_quantized(folder: Path) -> None:
    pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')
    write_encoder(folder)
    model, _ = load(folder, quantize="int8", num_labels=8, device="cpu")
    predicted = vramfit.estimate(str(folder), mode="infer", batch=1, seq=8, num_labels=8, quantize="int8")
    assert predicted.breakdown["weights"] == offloading.model_bytes(model)


def test_a_host_without_memory_refuses_before_anything_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vramfit.loader import budget
    from vramfit.loader import model as making

    def read(inspection: object) -> None:
        raise AssertionError("a file was opened")

    model = write(folder)
    need = offloading.model_bytes(model) // 2
    monkeypatch.setattr(budget, "available_bytes", lambda: need // 2)
    monkeypatch.setattr(making, "CheckpointTensors", read)
    with pytest.raises(NoPlanFits, match=r"of the host's memory, and .* are available") as caught:
        load(folder, precision="bf16", device="cpu")
    assert caught.value.shortfall_bytes == pytest.approx(need - need // 2, rel=0.1)
    assert "in the precision it was saved in" in str(caught.value.hint)


def test_weights_that_stay_mapped_need_no_memory_of_the_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vramfit.loader import budget

    write(folder)
    monkeypatch.setattr(budget, "available_bytes", lambda: 64 * 2**10)
    load(folder, device="cpu")
    with pytest.raises(NoPlanFits):
        load("bert-tiny", random_weights=True, device="cpu")
    monkeypatch.setattr(budget, "available_bytes", lambda: None)
    load("bert-tiny", random_weights=True, device="cpu")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: …"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_host_that_runs_out_on_the_way_is_one_clear_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    from vramfit.loader.filling import CheckpointTensors, ToHost

    def fail(*_: object) -> None:
        raise error

    write(folder)
    for place, name in ((ToHost, "bring"), (CheckpointTensors, "_read")):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, fail)
            with pytest.raises(NoPlanFits, match=r"the host ran out of memory while .* was loaded") as caught:
                load(folder, precision="bf16", device="cpu")
            assert "\n" not in str(caught.value)


def test_other_errors_on_the_way_stay_what_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vramfit.loader.filling import ToHost

    def fail(*_: object) -> None:
        raise RuntimeError("something else")

    write(folder)
    monkeypatch.setattr(ToHost, "bring", fail)
    with pytest.raises(RuntimeError, match="something else"):
        load(folder, device="cpu")


@pytest.mark.parametrize(
    "wrong",
    [
        *({"plan": 5}, {"plan": {}}, {"progress": 5}, {"trust_remote_code": "no"}, {"random_weights": "no"}),
        *({"task": 5}, {"precision": []}, {"memory": {}}, {"seed": "x"}, {"num_labels": 1.5}, {"offload": 3}),
    ],
)
def test_a_keyword_of_the_wrong_kind_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match=f"^{next(iter(wrong))} "):
        vramfit.load("bert-tiny", **({"device": "cpu", "random_weights": True} | wrong))


@pytest.mark.parametrize(("name", "nearest"), [("quantise", "quantize"), ("batch", "task"), ("optimizer", "quantize")])
def test_a_keyword_that_is_no_loads_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(WorkloadError, match=f"unknown keyword '{name}'.*{nearest}"):
        vramfit.load("bert-tiny", device="cpu", random_weights=True, **{name: "x"})


@pytest.mark.parametrize("model", [None, 5])
def test_what_is_no_model_is_named_by_its_type(model: object) -> None:
    with pytest.raises(WorkloadError, match=f"not {type(model).__name__}"):
        load(model, device="cpu")
