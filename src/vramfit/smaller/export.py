"""`export`: a model as ONNX files in a folder of transformers, checked on real rows against its own answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vramfit.errors import VramfitError
from vramfit.models.hub import FOLDER, WHOLE
from vramfit.runtime.data.samples import Samples
from vramfit.runtime.onnx_model import OnnxModel, input_names, open_session
from vramfit.runtime.trained import TrainedModel
from vramfit.smaller.folder import check_output, fresh_folder, weights_bytes
from vramfit.smaller.graph import check_packages, quantize, write_graph
from vramfit.smaller.latency import time_in_turns
from vramfit.smaller.rows import Answers, Rows, difference, make_samples, outputs_of
from vramfit.smaller.source import Source, load_answering, write_as_saved
from vramfit.stages import tell
from vramfit.tasks.parts import pooling
from vramfit.tasks.parts.losses import model_inputs

INT8 = ("dynamic", "static")
"""Ranges of activations: found for each batch, or fixed beforehand on rows."""
MAX_DIFFERENCE = 1e-3
"""Of an fp32 file's outputs from the model's own."""
MAX_CHANGED = 0.05
LEAST_COSINE = 0.95
NUM_CHECKED = 256
"""Rows that are checked where nothing else is asked for."""
NUM_CALIBRATED = 128
"""Rows whose activations give the ranges of a static int8 file."""
CHECK_BATCH = 8
LATENCY_BATCHES = (1, 32)
ORIGINAL = "PyTorch fp32"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """What is to be exported."""

    source: Source
    output: Path
    data: tuple[str, ...]
    """Files of rows, to check the files on and to calibrate with."""
    text_columns: tuple[str, ...] = ()
    max_rows: int | None = None
    int8: str | None = None
    """One of `INT8`, for an int8 file beside the fp32 one."""
    max_changed: float = MAX_CHANGED
    """The share of rows that may get another answer from the int8 file."""
    accept: bool = False
    """Whether files that answer otherwise are kept too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """One of the forms of a model."""

    name: str
    file: str | None
    num_bytes: int
    max_difference: float
    """Of its outputs from those of the model."""
    num_changed: int
    """Rows with another answer: a label, a span, a word."""
    least_cosine: float | None
    """Of a vector with that of the model, for models that give vectors."""
    latency_s: float
    """Of one row."""
    rows_per_s: float
    """In batches of 32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What came of it."""

    model: str
    output: str
    num_rows: int
    """Rows that were compared."""
    num_threads: int
    versions: tuple[Version, ...]
    problems: tuple[str, ...]
    """What is beyond the bounds, where it was accepted."""


def export(request: ExportRequest) -> ExportReport:
    """Write a model as an fp32 ONNX file, and as an int8 one where asked for, with its configuration and tokenizer.

    Raises:
        MissingExtra: a package that exports is not installed.
        DataError: data that cannot be read, or has no texts.
        CheckpointError, UnknownModel: no model there, or no tokenizer.
        VramfitError: the output is there already, torch cannot export the family, or the answers differ too much.
    """
    check_packages()
    check_output(request.output)
    trained = request.source.open()
    rows = Rows(files=request.data, task=trained.task, text_columns=request.text_columns, max_rows=request.max_rows)
    samples = make_samples(rows.first(request.max_rows or NUM_CHECKED), trained)
    with fresh_folder(request.output) as folder:
        model = load_answering(trained)
        (folder / FOLDER).mkdir()
        files = _write_files(model, trained, folder / FOLDER, samples, request.int8)
        tell("comparing answers and speed")
        versions = _compare(model, trained, files, samples)
        problems = tuple(_problems(versions, len(samples), request.max_changed))
        if problems and not request.accept:
            raise VramfitError(
                "; ".join(problems), hint="nothing was written; export without --int8, or --accept what differs"
            )
        write_as_saved(model, trained, folder)
        for file in folder.glob("*.safetensors*"):
            file.unlink()
    return ExportReport(
        model=trained.model,
        output=str(request.output),
        num_rows=len(samples),
        num_threads=torch.get_num_threads(),
        versions=versions,
        problems=problems,
    )


def _write_files(
    model: Any, trained: TrainedModel, folder: Path, samples: Samples, int8: str | None
) -> dict[str, Path]:
    """Name → the file that was written."""
    tell("exporting")
    files = {"ONNX fp32": folder / WHOLE}
    write_graph(model, files["ONNX fp32"], trained.max_length)
    if int8 is not None:
        name = f"ONNX int8 {int8}"
        files[name] = folder / f"model_qint8_{int8}.onnx"
        tell(f"quantizing, {int8}")
        calibration = _calibration(samples, input_names(model)) if int8 == "static" else None
        quantize(files["ONNX fp32"], files[name], calibration)
    return files


def _calibration(samples: Samples, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for begin in range(0, min(len(samples), NUM_CALIBRATED), CHECK_BATCH):
        batch = samples.collate(range(begin, min(begin + CHECK_BATCH, len(samples))))
        zeros = torch.zeros_like(batch["input_ids"])
        yield {name: batch.get(name, zeros).numpy() for name in names}


def _compare(model: Any, trained: TrainedModel, files: dict[str, Path], samples: Samples) -> tuple[Version, ...]:
    models, head = {ORIGINAL: model}, pooling.head_of(model)
    for name, file in files.items():
        models[name] = OnnxModel(open_session(file), model.config)
        if head is not None:
            pooling.attach(models[name], head)
    found = {name: list(_answers(one, trained, samples)) for name, one in models.items()}
    times = {size: _times(models, samples, size) for size in LATENCY_BATCHES}
    made = []
    for name in models:
        pairs = list(zip(found[ORIGINAL], found[name], strict=True))
        cosines = [_cosine(a["embedding"], b["embedding"]) for (a, _), (b, _) in pairs if "embedding" in a]
        exported = files.get(name)
        made.append(
            Version(
                name=name,
                file=None if exported is None else f"{FOLDER}/{exported.name}",
                num_bytes=exported.stat().st_size if exported is not None else weights_bytes(trained.model),
                max_difference=max(difference(a, b) for (a, _), (b, _) in pairs),
                num_changed=sum(x != y for (_, a), (_, b) in pairs for x, y in zip(a, b, strict=True)),
                least_cosine=min(cosines) if cosines else None,
                latency_s=times[1][name],
                rows_per_s=min(32, len(samples)) / times[32][name],
            )
        )
    return tuple(made)


def _answers(model: Any, trained: TrainedModel, samples: Samples) -> Iterator[tuple[Answers, list[dict[str, Any]]]]:
    """Of each batch: the numbers, and what is said of each row without its numbers."""
    for begin in range(0, len(samples), CHECK_BATCH):
        numbers = range(begin, min(begin + CHECK_BATCH, len(samples)))
        batch = samples.collate(numbers)
        with torch.no_grad():
            output = model(**model_inputs(batch))
        rows = trained.kind.predictions(output, batch, [samples.references[i] for i in numbers], trained.tokenizing)
        yield outputs_of(output, batch), [_without_numbers(row) for row in rows]


def _without_numbers(row: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in row.items():
        if isinstance(value, list):
            kept[name] = [_without_numbers(v) if isinstance(v, dict) else v for v in value if not isinstance(v, float)]
        elif not isinstance(value, float):
            kept[name] = value
    return kept


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b).min())


def _times(models: dict[str, Any], samples: Samples, batch: int) -> dict[str, float]:
    """Seconds of a batch of rows of middling length."""
    order = sorted(range(len(samples)), key=lambda i: samples.lengths[i])
    middle = max(len(order) // 2 - batch // 2, 0)
    inputs = model_inputs(samples.collate(order[middle : middle + batch]))

    def call(model: Any) -> Any:
        with torch.no_grad():
            return model(**inputs)

    took = time_in_turns({name: lambda model=model: call(model) for name, model in models.items()})  # type: ignore[misc]
    return {name: one.wall_s for name, one in took.items()}


def _problems(versions: tuple[Version, ...], num_rows: int, max_changed: float) -> Iterator[str]:
    """What is beyond the bounds, in words."""
    for version in versions:
        is_whole, changed = version.file == f"{FOLDER}/{WHOLE}", version.num_changed
        if is_whole and not version.max_difference <= MAX_DIFFERENCE:
            yield f"{version.name} gives other outputs: they differ by up to {version.max_difference:.3g}"
        if changed > max_changed * num_rows:
            allowed = f"{changed / num_rows:.1%}, and {max_changed:.1%} may"
            yield f"{version.name} answers {changed} of {num_rows} rows otherwise ({allowed})"
        cosine = version.least_cosine
        if cosine is not None and not cosine >= LEAST_COSINE:
            yield f"{version.name} gives other vectors: the least cosine is {cosine:.3f}, below {LEAST_COSINE}"
