"""Inspection of checkpoints that can be read: what fits, what is new, what is fatal."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.counting import num_bytes_read
from tests.unit.checkpoints.broken import load_script
from tests.unit.runtime.training.small_runs import write_model
from transformers import AutoConfig, BertForTokenClassification

from vramfit.checkpoints import inspection
from vramfit.checkpoints.inspection import Inspection, inspect_checkpoint, inspect_config
from vramfit.errors import CheckpointError, WorkloadError
from vramfit.models import resolve
from vramfit.records.finding import Finding

script = load_script()


def finding(inspection: Inspection, check: str) -> Finding:
    (found,) = [f for f in inspection.findings if f.check == check]
    return found


def test_the_real_checkpoint_fits_its_own_model_completely(real_folder: Path) -> None:
    found = inspect_checkpoint(real_folder, task="features", scan=True)
    assert {f.severity for f in found.findings} == {"ok"}
    assert (found.missing, found.fresh, found.unexpected, found.mismatched, found.converted) == ((), (), (), (), ())
    assert len(found.targets) == 103  # and position_ids, which is computed today
    assert found.num_bytes == sum(e.num_bytes for e in found.entries)
    assert not found.fatal
    found.check()


def test_a_new_head_is_expected_and_named(real_folder: Path) -> None:
    found = inspect_checkpoint(real_folder, num_labels=3)
    new = finding(found, "weights.head_new")
    assert new.severity == "info"
    assert "classifier (1,155 parameters)" in new.what
    assert found.fresh == found.missing == ("classifier.weight", "classifier.bias")
    assert not found.fatal


def test_names_that_lack_the_base_prefix_are_matched(real_folder: Path) -> None:
    found = inspect_checkpoint(real_folder)
    assert found.renamed["embeddings.word_embeddings.weight"] == "bert.embeddings.word_embeddings.weight"
    assert "prefix 'bert'" in finding(found, "weights.base_prefix").what


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_bert_large_is_inspected_by_its_header_alone(tmp_path: Path) -> None:
    from vramfit.models import build_meta, find_entry

    entry = find_entry("bert-large-uncased")
    assert entry is not None
    (tmp_path / "config.json").write_text(json.dumps(entry.config_data()))
    header, position = {}, 0
    for name, tensor in build_meta(resolve(tmp_path, task="masked-lm")).state_dict().items():
        end = position + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    script.write_raw(tmp_path / "model.safetensors", header, b"")
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) + position)  # 1.3 GB of nothing, which take no place on the disk
    found = inspect_checkpoint(tmp_path)  # with imports
    assert num_bytes_read(lambda: inspect_checkpoint(tmp_path)) < 2**20
    assert len(found.targets) == 389
    assert found.num_bytes > 1.3e9


def test_a_pretraining_head_is_dropped_and_a_missing_pooler_is_new(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert finding(found, "weights.pretraining_head").severity == "info"
    assert finding(found, "weights.pooler_new").severity == "info"
    assert "bert.pooler.dense.weight" in found.fresh
    assert not found.fatal
    assert finding(inspect_checkpoint(tmp_path, task="features"), "weights.pooler_new").severity == "warning"


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module.model.", "0.auto_model."])
def test_prefixes_of_wrappers_are_taken_off(folder: Path, prefix: str) -> None:
    script.rename(lambda name: prefix + name)(folder)
    found = inspect_checkpoint(folder)
    assert finding(found, "weights.wrapper_prefix").what.startswith(f"the names begin with {prefix!r}")
    assert found.missing == found.unexpected == ()
    assert found.targets[f"{prefix}classifier.weight"] == "classifier.weight"
    assert not found.fatal


def test_a_wrapper_around_a_bare_encoder_is_taken_off_too(folder: Path) -> None:
    script.rename(lambda name: "module." + name.removeprefix("bert."))(folder)
    found = inspect_checkpoint(folder)
    assert found.targets["module.encoder.layer.1.output.dense.bias"] == "bert.encoder.layer.1.output.dense.bias"
    assert found.missing == ()


def test_old_names_are_renamed(folder: Path) -> None:
    script.rename(script.old_names)(folder)
    found = inspect_checkpoint(folder)
    assert found.renamed["bert.embeddings.LayerNorm.gamma"] == "bert.embeddings.LayerNorm.weight"
    assert found.missing == ()


def test_a_bin_file_is_inspected_like_any_other(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    found = inspect_checkpoint(folder, scan=True)
    assert len(found.targets) == 41
    assert {f.severity for f in found.findings} == {"ok"}


def test_shards_are_inspected_as_one(folder: Path) -> None:
    script.shard(folder)
    found = inspect_checkpoint(folder)
    assert len(found.files.paths) == 2
    assert len(found.targets) == 41
    assert "2 shards" in finding(found, "weights.files").what


def test_several_missing_layers_are_counted_and_fatal(folder: Path) -> None:
    script.change_config(num_hidden_layers=6)(folder)
    found = inspect_checkpoint(folder)
    fatal = finding(found, "weights.missing_layers")
    assert fatal.what == "4 of 6 encoder layers are not in the checkpoint: 2–5 (counting from 0)"
    assert found.fatal
    assert found.fresh == ()
    with pytest.raises(CheckpointError, match="4 of 6 encoder layers"):
        found.check()


def test_hundreds_of_layers_that_are_not_there_are_refused_unbuilt(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.change_config(num_hidden_layers=1000)(folder)
    monkeypatch.setattr(inspection, "build_meta", lambda *_: pytest.fail("a model is built"))
    with pytest.raises(CheckpointError, match=r"num_hidden_layers 1,000, the checkpoint has 2 layers") as caught:
        inspect_checkpoint(folder)
    assert caught.value.file == str(folder / "config.json")


def test_a_head_of_another_size_that_was_asked_for_is_replaced(folder: Path) -> None:
    found = inspect_checkpoint(folder, num_labels=5)
    assert finding(found, "weights.head_replaced").severity == "warning"
    assert set(found.fresh) == {"classifier.weight", "classifier.bias"}
    assert {m.name for m in found.mismatched} == set(found.fresh)
    assert not found.fatal


def test_a_head_of_another_size_that_nobody_asked_for_is_fatal(folder: Path) -> None:
    script.KINDS["labels"].break_it(folder)
    found = inspect_checkpoint(folder)
    assert found.fatal
    assert found.fresh == ()


def test_half_a_head_is_a_warning(folder: Path) -> None:
    script.without("classifier.bias")(folder)
    found = inspect_checkpoint(folder)
    assert "other tensors of it are" in finding(found, "weights.head_incomplete").what
    assert found.fresh == ("classifier.bias",)


def test_the_head_of_another_task_is_dropped(folder: Path) -> None:
    found = inspect_checkpoint(folder, task="question-answering")
    assert "classifier.bias, classifier.weight" in finding(found, "weights.other_head").what
    assert finding(found, "weights.pooler_unused").severity == "info"
    assert "qa_outputs" in finding(found, "weights.head_new").what


def test_one_wrong_field_gives_one_finding(folder: Path) -> None:
    script.change_config(hidden_size=64)(folder)
    found = [f for f in inspect_checkpoint(folder).findings if f.severity == "error"]
    assert [f.check for f in found] == ["weights.shape.hidden_size"]
    assert "hidden_size should be 32" in found[0].fix


@pytest.mark.parametrize(
    ("field", "value"),
    [("vocab_size", 120), ("max_position_embeddings", 64), ("type_vocab_size", 5), ("intermediate_size", 96)],
)
def test_the_field_that_is_wrong_is_named(folder: Path, field: str, value: int) -> None:
    script.change_config(**{field: value})(folder)
    found = finding(inspect_checkpoint(folder), f"weights.shape.{field}")
    assert f"config.json says {field} {value}, the checkpoint" in found.what
    assert found.fatal


def test_a_tensor_without_a_place_is_a_warning(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors") | {"bert.encoder.extra.weight": torch.ones(2)}
    save_file(tensors, folder / "model.safetensors")
    found = finding(inspect_checkpoint(folder), "weights.unexpected")
    assert (found.severity, "bert.encoder.extra.weight" in found.what) == ("warning", True)


@pytest.mark.parametrize(
    ("free_bytes", "severity", "says"),
    [
        (2**30, "ok", "the GPU has 1.00 GiB free"),
        (200_000, "warning", "the GPU has 195.31 KiB free"),
        (50_000, "error", "the GPU has 48.83 KiB free"),
        (10_000, "error", "the GPU has 9.77 KiB free"),
    ],
)
def test_weights_are_held_against_the_gpu_at_hand(folder: Path, free_bytes: int, severity: str, says: str) -> None:
    found = finding(inspect_checkpoint(folder, gpu_free_bytes=free_bytes), "gpu.weights")
    assert (found.severity, says in found.what) == (severity, True)


def test_without_a_gpu_nothing_is_said_of_one(folder: Path) -> None:
    assert not [f for f in inspect_checkpoint(folder).findings if f.check.startswith("gpu")]


@pytest.mark.parametrize(
    ("version", "severity"),
    [("9.0.0", "warning"), ("4.2.0", None), ("5.999.0", "info"), ("what", "info"), (7, "warning")],
)
def test_the_version_that_wrote_the_configuration_is_judged(
    folder: Path, version: object, severity: str | None
) -> None:
    from vramfit.checkpoints.checks import check_version

    assert [f.severity for f in check_version(version, "5.22.2")] == ([severity] if severity else [])


def test_a_quantized_checkpoint_is_fatal(folder: Path) -> None:
    script.change_config(quantization_config={"quant_method": "gptq", "bits": 4})(folder)
    assert "quantized with gptq" in finding(inspect_checkpoint(folder), "weights.quantized").what


def test_mixed_precisions_are_told(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["classifier.weight"] = tensors["classifier.weight"].half()
    save_file(tensors, folder / "model.safetensors")
    assert "40 in fp32, 1 in fp16" in finding(inspect_checkpoint(folder), "weights.dtype").what


def test_a_resolved_model_is_taken_as_it_is(folder: Path) -> None:
    found = inspect_checkpoint(resolve(folder, task="masked-lm"))
    assert any(name.startswith("cls.") for name in found.fresh)


def test_weights_may_lie_elsewhere_than_the_configuration(folder: Path) -> None:
    resolved = resolve("bert-tiny", task="features")
    with pytest.raises(CheckpointError, match="no weights on this machine"):
        inspect_checkpoint(resolved)
    assert inspect_checkpoint(replace(resolved, folder=folder)).fatal


def test_a_task_without_a_head_is_the_workloads_error(folder: Path) -> None:
    with pytest.raises(WorkloadError):
        inspect_checkpoint(folder, task="translation")


def test_a_configuration_alone_can_be_checked() -> None:
    (good, fit) = sorted(inspect_config(resolve("bert-tiny"), gpu_free_bytes=2**30), key=lambda f: f.check)
    assert "4,386,178 parameters" in good.what
    assert fit.check == "gpu.weights"


@pytest.mark.parametrize(("saved", "num_labels"), [("ForSequenceClassification", None), ("ForQuestionAnswering", 2)])
def test_the_head_of_another_task_is_not_taken_for_this_ones(
    saved: str, num_labels: int | None, tmp_path: Path
) -> None:
    """Its weights have the names and the shapes of a new one."""
    write_model(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    BertForTokenClassification(config).save_pretrained(tmp_path)
    own = inspect_checkpoint(tmp_path, task="token-classification", num_labels=num_labels)
    assert own.fresh == ()
    script.change_config(architectures=[f"Bert{saved}"])(tmp_path)
    found = inspect_checkpoint(tmp_path, task="token-classification", num_labels=num_labels)
    assert sorted(found.fresh) == ["classifier.bias", "classifier.weight"]
    assert "new head: classifier (66 parameters)" in finding(found, "weights.head_new").what
    other = finding(found, "weights.other_head").what
    assert other == "the head of another task of the checkpoint is not used: classifier.bias, classifier.weight"
    assert not found.fatal


def test_findings_come_gravest_first(folder: Path) -> None:
    script.KINDS["layer-missing"].break_it(folder)
    script.change_config(transformers_version="9.0")(folder)
    found = [f.severity for f in inspect_checkpoint(folder).findings]
    assert found[0] == "error"
    assert found == sorted(found, key=["error", "warning", "info", "ok"].index)


def test_hostile_lists_in_a_configuration_do_no_harm(folder: Path) -> None:
    for value in (5, "x", {"a": 1}, [1, None, []]):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": value}))
        try:
            inspect_checkpoint(folder)
        except CheckpointError as error:
            assert "config.json" in str(error)  # noqa: PT017 - either answer is a good one
