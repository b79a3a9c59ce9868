"""Vectors of texts, in memory and streamed to files, beside those of sentence-transformers."""

import errno
import gc
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.unit.loader.checkpoints import minilm
from tests.unit.models.sentence_folders import write_folder, write_json
from tests.unit.runtime.training.small_runs import BAD, GOOD, PLAIN, write_model

import vramfit
from vramfit.errors import CheckpointError, DataError, MissingExtra, VramfitError, WorkloadError
from vramfit.runtime.device import RunDevice
from vramfit.runtime.encoding import encode as encoding
from vramfit.runtime.encoding import outputs, texts
from vramfit.runtime.encoding.request import DTYPES, fingerprint

ODD = ["A cat sat on the mat.", "", "  ", ".", "word " * 2000, "Ünïcode 漢字", "\n\t", "[SEP] [MASK]", "a\x00b"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("encoder") / "model"))


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "HOST_PART_ROWS", 7)


def lines(num: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices((*GOOD, *BAD, *PLAIN), k=draw.randint(1, 20))) for _ in range(num)]


def write_lines(path: Path, rows: list[str]) -> str:
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return str(path)


def encode(model: str, data: Any, **settings: Any) -> Any:
    return vramfit.encode(model, data, **{"device": "cpu"} | settings)


def theirs(model: str, data: list[str], **settings: Any) -> Any:
    package = pytest.importorskip("sentence_transformers")
    return package.SentenceTransformer(model, device="cpu").encode(data, **settings)


def test_vectors_equal_those_of_sentence_transformers() -> None:
    folder = str(minilm())
    data = ODD + [f"row {n} " + "and so on " * (n % 40) for n in range(40)]
    assert np.abs(encode(folder, data) - theirs(folder, data)).max() < 1e-5


def test_shorter_vectors_have_unit_length_again() -> None:
    folder = str(minilm())
    ours = encode(folder, ODD, dims=64)
    assert np.abs(ours - theirs(folder, ODD, truncate_dim=64, normalize_embeddings=True)).max() < 1e-5
    with pytest.raises(WorkloadError, match="dims 385 is more than the 384 numbers of a vector"):
        encode(folder, ODD, dims=385)


def test_an_encoder_without_a_folder_for_its_head_gives_the_mean(model: str) -> None:
    data = lines(9)
    plain = encode(model, data, task="features")
    assert np.abs(plain - theirs(model, data)).max() < 1e-5
    assert np.abs(encode(model, data) - plain / np.linalg.norm(plain, axis=1, keepdims=True)).max() < 1e-5


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name not in ("float32", "float16")])
def test_fewer_bits_are_those_of_sentence_transformers(model: str, dtype: str) -> None:
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    data = lines(120)
    vectors = encode(model, data, dims=30)
    ours = encode(model, data, dims=30, dtype=dtype)
    expected = quantization.quantize_embeddings(vectors, dtype)
    assert ours.dtype == expected.dtype
    assert np.array_equal(ours, expected)


def test_a_constant_number_is_stored_without_a_division_by_zero(model: str) -> None:
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    same = encode(model, ["fine film"] * 3)
    assert np.array_equal(
        encode(model, ["fine film"] * 3, dtype="int8"), quantization.quantize_embeddings(same, "int8")
    )
    with pytest.raises(WorkloadError, match="there is only one") as caught:
        encode(model, ["fine film"], dtype="int8")
    assert "--calibration" in str(caught.value.hint)


def test_prompts_go_before_texts_as_in_sentence_transformers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "Normalize")
    prompts = {"prompts": {"q": "anna saw ", "d": "tom "}, "default_prompt_name": "q"}
    write_json(folder / "config_sentence_transformers.json", prompts)
    data, name = lines(5), str(folder)
    vectors = {"default": encode(name, data), "d": encode(name, data, prompt_name="d")}
    vectors |= {"own": encode(name, data, prompt="paris "), "none": encode(name, data, prompt="")}
    vectors["query"] = encode(name, data, prompt_name="query")
    assert np.abs(vectors["default"] - theirs(name, data)).max() < 1e-5
    assert np.abs(vectors["d"] - theirs(name, data, prompt_name="d")).max() < 1e-5
    assert np.abs(vectors["own"] - theirs(name, data, prompt="paris ")).max() < 1e-5
    assert np.abs(vectors["none"] - theirs(name, data, prompt="")).max() < 1e-5
    assert np.array_equal(vectors["query"], vectors["none"])
    assert np.abs(vectors["default"] - vectors["none"]).max() > 1e-3
    with pytest.raises(WorkloadError, match="prompt name 'x' is not one that the model has: query, document, q, d"):
        encode(name, data, prompt_name="x")


def test_a_prompt_whose_tokens_are_not_pooled_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "Normalize")
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "mean", "include_prompt": False})
    assert len(encode(str(folder), ["film"])) == 1
    with pytest.raises(CheckpointError, match="include_prompt is false"):
        encode(str(folder), ["film"], prompt="anna ")


def test_the_length_that_a_folder_cuts_to_is_cut_to_as_there(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "Normalize")
    write_json(folder / "config_sentence_transformers.json", {"truncate_dim": 8})
    data = lines(5)
    assert np.abs(encode(str(folder), data) - theirs(str(folder), data)).max() < 1e-5
    longer = theirs(str(folder), data, truncate_dim=16, normalize_embeddings=True)
    assert np.abs(encode(str(folder), data, dims=16) - longer).max() < 1e-5


def read(path: Path) -> tuple[Any, Any]:
    """The vectors of an output, and the rows that they are of where it says so."""
    if path.suffix == ".npy":
        index = path.with_name(f"{path.stem}.index.npy")
        return np.load(path), np.load(index).tolist() if index.exists() else None
    if path.suffix == ".safetensors":
        tensors = load_file(path)
        return tensors["embeddings"], tensors["index"].tolist() if "index" in tensors else None
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return np.array([row["embedding"] for row in rows]), [row["index"] for row in rows]
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(path)
    return np.array(table["embedding"].to_pylist()), table["index"].to_pylist()


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("dtype", ["float32", "float16", "binary"])
@pytest.mark.parametrize("ending", [".npy", ".safetensors", ".jsonl", ".parquet"])
def test_every_format_holds_the_vectors_in_the_order_of_the_rows(
    model: str, tmp_path: Path, ending: str, dtype: str
) -> None:
    rows = lines(30)
    data, output = write_lines(tmp_path / "rows.txt", rows), tmp_path / f"vectors{ending}"
    report = encode(model, data, output=str(output), dtype=dtype)
    vectors, _ = read(output)
    expected = encode(model, rows, dtype=dtype)
    assert (report.num_vectors, report.width) == expected.shape
    if ending in (".npy", ".safetensors"):
        assert vectors.dtype == expected.dtype
    close = {"float32": 1e-6, "float16": 1e-3, "binary": 0}[dtype]
    assert np.abs(vectors.astype(float) - expected.astype(float)).max() <= close
    assert sorted(os.listdir(tmp_path)) == sorted(["rows.txt", output.name, f"{output.name}.manifest.json"])


@pytest.mark.parametrize("ending", [".npy", ".safetensors", ".jsonl", ".parquet"])
@pytest.mark.usefixtures("_small_parts")
def test_rows_that_are_left_out_are_missing_from_the_index(model: str, tmp_path: Path, ending: str) -> None:
    rows = lines(20)
    bad = {0, 7, 8, 9, 10, 11, 12, 13, 19}  # a whole part among them
    held = [{"text": None} if n in bad else {"text": row} for n, row in enumerate(rows)]
    data = write_lines(tmp_path / "rows.jsonl", [json.dumps(row) for row in held])
    output = tmp_path / f"vectors{ending}"
    with pytest.raises(DataError, match=r"rows.jsonl: 1 of 7 rows cannot be used: row 1: text is empty") as caught:
        encode(model, data, output=str(output))
    assert "--skip-bad-rows" in str(caught.value.hint)
    report = encode(model, data, output=str(output), skip_bad_rows=True, dtype="int8", dims=13)
    assert (report.num_bad_rows, report.first_bad_row) == (9, "row 1: text is empty")
    vectors, index = read(output)
    assert index == [n for n in range(20) if n not in bad]
    assert vectors.shape == (11, 13)
    encode(model, lines(20), output=str(output))
    assert read(output)[1] in (None, list(range(20)))  # none of the rows before


@pytest.mark.usefixtures("_small_parts")
def test_a_bad_row_that_ended_a_run_may_be_left_out_when_it_goes_on(model: str, tmp_path: Path) -> None:
    rows = [*lines(40), "", *lines(3)]
    data, output = write_lines(tmp_path / "rows.jsonl", [json.dumps({"text": t}) for t in rows]), tmp_path / "v.npy"
    with pytest.raises(DataError, match=r"rows.jsonl: 1 of 7 rows cannot be used: row 41: text is empty"):
        encode(model, data, output=str(output))
    report = encode(model, data, output=str(output), resume=True, skip_bad_rows=True)
    assert report.num_encoded < 43
    assert report.num_bad_rows == 1
    assert read(output)[1] == [n for n in range(44) if n != 40]


def test_ranges_are_those_of_the_first_part_or_of_the_texts_that_are_named(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    monkeypatch.setattr(texts, "HOST_PART_ROWS", 10)
    rows, other = lines(30), lines(25, seed=5)
    data, output = write_lines(tmp_path / "rows.txt", rows), tmp_path / "vectors.npy"
    vectors, others = encode(model, rows), encode(model, other)
    report = encode(model, data, output=str(output), dtype="int8")
    expected = quantization.quantize_embeddings(vectors, "int8", calibration_embeddings=vectors[:10])
    assert np.array_equal(np.load(output), expected)
    assert "ranges of int8 are those of the first 10 vectors; so few" in report.notes[0]
    named = write_lines(tmp_path / "other.txt", other)
    encode(model, data, output=str(output), dtype="uint8", calibration=named)
    expected = quantization.quantize_embeddings(vectors, "uint8", calibration_embeddings=others)
    assert np.array_equal(np.load(output), expected)
    held = json.loads(outputs.manifest_of(output).read_text())["ranges"]
    assert np.array_equal(np.array(held, np.float32), np.vstack((others.min(0), others.max(0))))


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("ending", [".npy", ".safetensors", ".jsonl"])
def test_a_full_disk_loses_nothing_and_the_run_goes_on(
    model: str, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_lines(tmp_path / "rows.txt", lines(40))
    whole, output = tmp_path / f"whole{ending}", tmp_path / f"vectors{ending}"
    encode(model, data, output=str(whole), dtype="int8")
    calls = 0

    def sync(number: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(outputs.os, "fsync", sync)
        with pytest.raises(VramfitError, match=r"cannot write .*partial: No space left on device") as caught:
            encode(model, data, output=str(output), dtype="int8")
    assert "make room on the disk" in str(caught.value.hint)
    assert "--resume" in str(caught.value.hint)
    assert not output.exists()
    with pytest.raises(VramfitError, match="is not whole: 21 vectors of a run that has ended are in") as caught:
        encode(model, data, output=str(output), dtype="int8")
    report = encode(model, data, output=str(output), dtype="int8", resume=True)
    assert (report.num_encoded, report.num_vectors) == (19, 40)
    assert output.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("ending", [".npy", ".jsonl"])
def test_a_run_that_ends_at_its_very_end_goes_on(
    model: str, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, output = write_lines(tmp_path / "rows.txt", lines(9)), tmp_path / f"vectors{ending}"
    encode(model, ["film"], output=str(output))
    usual = os.replace

    def lose_power(source: Any, target: Any) -> None:
        if str(source).endswith((".partial", ".finishing")):
            raise SystemExit
        usual(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lose_power)
        with pytest.raises(SystemExit):
            encode(model, data, output=str(output))
    assert len(read(output)[0]) == 1
    encode(model, data, output=str(output), resume=True)
    assert np.abs(read(output)[0] - encode(model, lines(9))).max() < 1e-6
    assert sorted(os.listdir(tmp_path)) == sorted(["rows.txt", output.name, f"{output.name}.manifest.json"])


@pytest.mark.usefixtures("_small_parts")
def test_what_an_interrupt_keeps_is_said_and_gone_on_with(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, output = write_lines(tmp_path / "rows.txt", lines(40)), tmp_path / "vectors.npy"

    def rows() -> Any:
        yield from lines(30)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="14 vectors are kept; go on after them: --resume"):
        encode(model, rows(), output=str(output))
    report = encode(model, data, output=str(output), resume=True)
    assert report.num_encoded == 26
    assert np.abs(np.load(output) - encode(model, lines(40))).max() < 1e-6


@pytest.mark.usefixtures("_small_parts")
def test_a_run_with_other_settings_or_data_is_refused_by_name(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = lines(40)
    output = tmp_path / "vectors.npy"

    def broken() -> Any:
        yield from rows[:30]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(model, broken(), output=str(output))

    def go_on(data: Any = rows, **settings: Any) -> Any:
        return encode(model, data, output=str(output), resume=True, **settings)

    with pytest.raises(
        VramfitError, match="other settings: dtype was 'float32', and is 'int8' now; dims was None, and"
    ):
        go_on(dtype="int8", dims=4)
    with pytest.raises(VramfitError, match="prompt was '', and is 'anna ' now"):
        go_on(prompt="anna ")
    with pytest.raises(DataError, match="has changed: 14 rows of it are encoded, and now they are others"):
        go_on(["other", *rows[1:]])
    with pytest.raises(DataError, match="has changed: 14 rows of it are encoded, and now there are 13"):
        go_on(rows[:13])
    with monkeypatch.context() as patch:
        patch.setattr("vramfit.runtime.encoding.model.fingerprint", lambda _: "another")
        with pytest.raises(VramfitError, match="other settings: model was"):
            go_on()
    assert go_on().num_vectors == 40
    assert go_on().notes == ("all vectors were there already",)
    with pytest.raises(DataError, match="the data has more rows than"):
        go_on([*rows, "film"])
    output.unlink()
    assert (go_on().num_encoded, len(np.load(output))) == (40, 40)


def test_two_runs_do_not_write_one_output(model: str, tmp_path: Path) -> None:
    output = tmp_path / "vectors.npy"

    def rows() -> Any:
        with pytest.raises(VramfitError, match=r"another process writes .*vectors\.npy"):
            encode(model, ["film"], output=str(output))
        yield from lines(9)

    assert encode(model, rows(), output=str(output)).num_vectors == len(np.load(output)) == 9
    assert sorted(os.listdir(tmp_path)) == ["vectors.npy", "vectors.npy.manifest.json"]


def test_another_model_in_the_same_folder_has_another_fingerprint(tmp_path: Path) -> None:
    one = fingerprint(str(write_model(tmp_path / "one")))
    assert fingerprint(str(write_model(tmp_path / "copy"))) == one
    assert fingerprint(str(write_model(tmp_path / "other", intermediate_size=64))) != one


@pytest.mark.usefixtures("_small_parts")
def test_memory_does_not_grow_with_the_rows(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a larger file has more, a tenth would be too much: twenty parts of sixty are not held at once."""
    monkeypatch.setattr(texts, "HOST_PART_ROWS", 50)
    monkeypatch.setattr(outputs, "BLOCK_ROWS", 50)

    class Collected(encoding._Filling):
        """What nothing refers to any more does not count, whenever Python would have collected it."""

        num_parts = 0

        def __init__(self, *arguments: Any) -> None:
            Collected.num_parts += 1
            if Collected.num_parts % 6 == 0:
                gc.collect()
            super().__init__(*arguments)

    monkeypatch.setattr(encoding, "_Filling", Collected)
    peaks, sizes = {}, {}
    for num in (600, 600, 3000):  # the first one pays for what is made once; twelve parts are as many as are ever alive
        data = write_lines(tmp_path / "rows.txt", [f"{row} film number {n} " * 20 for n, row in enumerate(lines(num))])
        gc.collect()
        tracemalloc.start()
        encode(model, data, output=str(tmp_path / "vectors.jsonl"))
        peaks[num], sizes[num] = tracemalloc.get_traced_memory()[1], Path(data).stat().st_size
        tracemalloc.stop()
    assert peaks[3000] - peaks[600] < 0.1 * (sizes[3000] - sizes[600])


@pytest.mark.usefixtures("_small_parts")
def test_no_more_than_a_few_parts_are_held(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, most = 0, 0

    class Counted(encoding._Filling):
        def __init__(self, *arguments: Any) -> None:
            nonlocal held, most
            super().__init__(*arguments)
            held += 1
            most = max(most, held)

        def __del__(self) -> None:
            nonlocal held
            held -= 1

    monkeypatch.setattr(encoding, "_Filling", Counted)
    encode(model, write_lines(tmp_path / "rows.txt", lines(210)), output=str(tmp_path / "vectors.npy"))
    assert most <= 3


def test_memory_that_runs_out_halves_batches_and_changes_no_vector(model: str, tmp_path: Path) -> None:
    rows = lines(200)
    data, output = write_lines(tmp_path / "rows.txt", rows), str(tmp_path / "vectors.npy")
    report = encode(model, data, output=output, device="emulated", memory="4MiB", batch=200)
    assert report.num_recoveries > 0
    assert report.reserved_bytes <= 4 * 2**20
    assert np.abs(np.load(output) - encode(model, rows)).max() < 1e-6


def test_the_precision_is_that_of_the_gpu_unless_it_is_to_be_exact(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, output = write_lines(tmp_path / "rows.txt", lines(9)), str(tmp_path / "vectors.npy")
    monkeypatch.setattr(RunDevice, "capability", (9, 0))
    assert encode(model, data, output=output).arithmetic == "bf16"
    rough = np.load(output)
    assert encode(model, data, output=output, exact=True).arithmetic == "fp32"
    assert 0 < np.abs(np.load(output) - rough).max() < 0.05


def test_what_contradicts_itself_is_said_at_once() -> None:
    with pytest.raises(WorkloadError) as caught:
        vramfit.encode("m", [], dtype="int9", dims=0, resume=True, exact=True, precision="bf16", task="masked-lm")
    told = str(caught.value)
    for part in ("dtype 'int9'", "nearest: int8", "dims 0", "resume", "exact is fp32", "task masked-lm gives no vect"):
        assert part in told


def test_lists_hold_texts(model: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the texts: 1 of 2 rows cannot be used: row 2: int, not a text"):
        encode(model, ["film", 7])
    with pytest.raises(DataError, match="row 2: it has half of a surrogate pair, which is no character"):
        encode(model, ["a", "half \ud800"])
    with pytest.raises(DataError, match="the texts: there are no rows in it"):
        encode(model, [])
    pairs = write_lines(tmp_path / "pairs.csv", ["anchor,positive", "fine,great"])
    with pytest.raises(DataError, match="several columns of texts: anchor, positive; a row gets one vector"):
        encode(model, pairs)
    assert len(encode(model, pairs, text_column="positive")) == 1


def test_parquet_without_pyarrow_says_what_to_install(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="needs the package pyarrow"):
        encode(model, ["film"], output=str(tmp_path / "vectors.parquet"))


def test_checkpoints_of_the_run_that_made_a_model_are_no_part_of_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "made")
    before = fingerprint(str(folder))
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "checkpoints" / "step-1" / "model.safetensors").write_bytes(b"weights")
    assert fingerprint(str(folder)) == before
    (folder / "model.safetensors").write_bytes(b"others")
    assert fingerprint(str(folder)) != before
