"""Exported files: the model's own answers at every batch and length, run by ONNX Runtime and by vramfit's verbs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.models.sentence_folders import TEXTS, write_folder
from tests.unit.runtime.training.small_runs import write_classes
from tests.unit.serve.small_servers import ask, engine_of, write_head
from tests.unit.smaller.tokenizers_made import ENGLISH, write_corpus, write_multilingual
from transformers import AutoModelForSequenceClassification

import vramfit
from vramfit.doctor.checkup import check_model
from vramfit.errors import CheckpointError, MissingExtra, VramfitError, WorkloadError
from vramfit.models.hub import exported_file
from vramfit.records.codec import from_json, to_json
from vramfit.records.measurement import ModelTable
from vramfit.report.html import Drawn
from vramfit.report.models import cells_of, models_sections
from vramfit.runtime.device import RunDevice
from vramfit.runtime.onnx_model import open_session
from vramfit.runtime.trained import open_model
from vramfit.runtime.training.request import TrainRequest
from vramfit.runtime.training.train import train
from vramfit.smaller import export as exporting
from vramfit.smaller import graph
from vramfit.smaller.export import ExportReport, ExportRequest, export
from vramfit.smaller.source import Source

onnxruntime = pytest.importorskip("onnxruntime")


def run(folder: Path, output: Path, data: Path, **more: Any) -> ExportReport:
    return export(ExportRequest(source=Source(model=str(folder)), data=(str(data),), output=output, **more))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its data, and what it was exported to with int8."""
    made = tmp_path_factory.mktemp("classifier")
    write_head(made / "model", "sequence-classification")
    write_classes(made / "data.csv", num_rows=40)
    run(made / "model", made / "exported", made / "data.csv", int8="dynamic")
    return made


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("embedder")
    write_folder(made / "model", "Dense", "Normalize")
    (made / "data.txt").write_text("\n".join(TEXTS * 5), encoding="utf-8")
    run(made / "model", made / "exported", made / "data.txt")
    return made


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 48), (2, 5), (9, 17)])
def test_batch_and_length_are_open(batch: int, length: int, classifier: Path) -> None:
    session = onnxruntime.InferenceSession(classifier / "exported" / "onnx" / "model.onnx")
    assert [one.name for one in session.get_inputs()] == ["input_ids", "attention_mask", "token_type_ids"]
    ids = torch.randint(5, 30, (batch, length), generator=torch.Generator().manual_seed(batch))
    mask = torch.ones_like(ids)
    mask[-1, length // 2 + 1 :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    model = AutoModelForSequenceClassification.from_pretrained(classifier / "model").eval()
    with torch.no_grad():
        expected = model(**inputs).logits
    (found,) = session.run(["logits"], {name: value.numpy() for name, value in inputs.items()})
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


def test_the_folder_has_what_others_look_for_and_no_weights_twice(classifier: Path) -> None:
    folder = classifier / "exported"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    named = {"config.json", "tokenizer.json", "tokenizer_config.json", "onnx/model.onnx"}
    assert files == named | {"onnx/model_qint8_dynamic.onnx"}
    assert exported_file(str(folder)) == folder / "onnx" / "model_qint8_dynamic.onnx"
    assert exported_file(str(classifier / "model")) is None


def test_a_server_answers_with_the_exported_file(classifier: Path) -> None:
    texts = ["the film was great", "the music was awful and dull ."]
    (whole, exported) = (ask(engine_of(classifier / name), texts) for name in ("model", "exported"))
    assert [row["label"] for row in exported] == [row["label"] for row in whole]
    for a, b in zip(exported, whole, strict=True):
        assert a["probability"] == pytest.approx(b["probability"], abs=0.05)
        assert a["probability"] != b["probability"]  # it is int8


def test_vectors_are_pooled_after_the_file(embedder: Path) -> None:
    whole, exported = (vramfit.encode(str(embedder / name), TEXTS, device="cpu") for name in ("model", "exported"))
    np.testing.assert_allclose(exported, whole, atol=1e-5)
    assert (embedder / "exported" / "modules.json").exists()
    assert (embedder / "exported" / "2_Dense" / "model.safetensors").exists()


def test_exact_vectors_are_not_computed_in_int8(embedder: Path, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    run(embedder / "model", exported, embedder / "data.txt", int8="dynamic", accept=True)
    with pytest.raises(WorkloadError, match=r"exact is fp32, and .*model_qint8_dynamic.onnx computes in int8") as error:
        vramfit.encode(str(exported), TEXTS, device="cpu", exact=True)
    assert "delete the int8 file" in str(error.value.hint)
    (exported / "onnx" / "model_qint8_dynamic.onnx").unlink()
    whole = vramfit.encode(str(embedder / "model"), TEXTS, device="cpu")
    np.testing.assert_allclose(vramfit.encode(str(exported), TEXTS, device="cpu", exact=True), whole, atol=1e-5)


def test_static_int8_is_calibrated_on_the_rows(tmp_path: Path) -> None:
    folder = write_multilingual(tmp_path / "model", "byte-level bpe")
    data = write_corpus(tmp_path / "data.txt")
    report = run(folder, tmp_path / "exported", data, int8="static", accept=True)
    original, whole, int8 = report.versions
    assert (whole.file, int8.file) == ("onnx/model.onnx", "onnx/model_qint8_static.onnx")
    assert original.max_difference == 0.0
    assert whole.max_difference < 1e-5 < int8.max_difference
    assert report.num_rows == len(ENGLISH)
    assert min(version.latency_s for version in report.versions) > 0


def test_what_answers_otherwise_is_refused_unless_accepted(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "write_graph", lambda model, file, longest: _write_other(classifier, file))
    with pytest.raises(VramfitError, match="gives other outputs: they differ by up to"):
        run(classifier / "model", tmp_path / "new", classifier / "data.csv")
    assert list(tmp_path.iterdir()) == []
    report = run(classifier / "model", tmp_path / "new", classifier / "data.csv", accept=True)
    assert len(report.problems) == 1


def _write_other(classifier: Path, file: Path) -> None:
    file.write_bytes((classifier / "exported" / "onnx" / "model_qint8_dynamic.onnx").read_bytes())


def test_a_missing_package_is_named(classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(MissingExtra, match="onnxscript") as error:
        run(classifier / "model", tmp_path / "new", classifier / "data.csv")
    assert error.value.hint == 'pip install "vramfit[export]"'


def test_an_exported_model_runs_on_the_cpu_as_it_is(classifier: Path) -> None:
    trained = open_model(str(classifier / "exported"))
    with pytest.raises(WorkloadError, match="runs on the CPU"):
        trained.load_weights(trained.workload(), RunDevice("emulated", memory="1GiB"), None)
    with pytest.raises(WorkloadError, match="precision bf16"):
        trained.load_weights(trained.workload(precision="bf16"), RunDevice("cpu"), None)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(CheckpointError, match=r"model\.onnx cannot be run"):
        open_session(tmp_path / "model.onnx")


def test_compared_beside_others_it_has_the_parameters_of_its_model_and_no_memory(classifier: Path) -> None:
    models = [str(classifier / "model"), str(classifier / "exported")]
    found = vramfit.compare(models, str(classifier / "data.csv"), device="cpu", batch=4)
    whole, exported = found.rows
    assert exported.num_parameters == whole.num_parameters > 0
    file = classifier / "exported" / "onnx" / "model_qint8_dynamic.onnx"
    assert exported.disk_bytes == file.stat().st_size
    assert (exported.training_bytes, exported.serving_bytes) == (None, None)
    assert [list(cells_of(found))[1][place] for place in (3, 4)] == ["–", "–"]
    said = f"exported (ONNX), which only a CPU runs: no GPU memory is predicted of {models[1]}"
    assert said in found.notes
    assert "What a smaller model costs" in "".join(models_sections(found, Drawn()))
    assert from_json(ModelTable, to_json(found)) == found


def test_what_needs_its_weights_says_that_it_is_exported(classifier: Path, tmp_path: Path) -> None:
    exported, data = str(classifier / "exported"), str(classifier / "data.csv")
    origin = "give the folder that it was exported from"
    for given in ({"model": exported}, {"model": exported, "teacher": str(classifier / "model")}):
        with pytest.raises(WorkloadError, match=r"is an exported model \(ONNX\), which cannot be trained") as error:
            train(TrainRequest(**given, data=data, output=str(tmp_path / "out"), device="cpu"))
        assert error.value.hint == origin
    assert not (tmp_path / "out").exists()
    for use in (
        lambda: vramfit.load(exported, device="cpu"),
        lambda: vramfit.distill(exported, data, output=str(tmp_path / "out"), device="cpu"),
    ):
        with pytest.raises(CheckpointError, match=r"is an exported model \(ONNX\), whose weights cannot be re") as why:
            use()
        assert (why.value.hint or "").startswith(origin)
    config, note = check_model(exported)
    assert (config.severity, note.severity, note.check) == ("ok", "info", "weights.exported")
    assert origin in note.fix
