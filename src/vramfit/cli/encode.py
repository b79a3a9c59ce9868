"""`vramfit encode`: the vectors of all texts of a file, of any size."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from vramfit.cli.first_look import LOOKED_AT_BYTES, look_at_columns
from vramfit.cli.inference import DATA, PRECISIONS, InferenceOptions
from vramfit.cli.options import Json, argument, opt, option, verb
from vramfit.cli.terminal import print_json, say, working
from vramfit.runtime.encoding.request import DTYPES, ENDINGS, EncodeRequest
from vramfit.units import counted, shown

if TYPE_CHECKING:
    from vramfit.runtime.encoding.request import EncodeReport

ENCODER = argument("A folder of sentence-transformers or vramfit train, or any encoder.", "MODEL")
PRECISION = option(f"Number format. One of {PRECISIONS}. Default: bf16 where the GPU has it, otherwise fp32.", "NAME")


@dataclass(frozen=True, kw_only=True)
class EncodeOptions(InferenceOptions):
    """A model, a file of texts, and how they are computed."""

    model: Annotated[str, ENCODER]
    task: Annotated[str | None, option("embedding, or features: the unnormalized mean of tokens.", "NAME")] = None
    text_column: str | None = opt(None, "Column of the texts.", "NAME")
    precision: Annotated[str | None, PRECISION] = None  # type: ignore[assignment]
    exact: bool = opt(False, "Compute in fp32.")


@dataclass(frozen=True, kw_only=True)
class VectorOutput:
    """What is stored of vectors, and where."""

    output: Annotated[str, option(f"Write here: {', '.join(ENDINGS)}.", "FILE", "--output", "-o")]
    dtype: str = opt("float32", f"One of {', '.join(DTYPES)}; binary keeps the sign of each number as one bit.", "NAME")
    dims: int | None = opt(None, "Truncate vectors to N numbers; unit vectors are normalized again.", "N", min=1)
    prompt: str | None = opt(None, "Text to put before every text. Default: the folder's prompt.", "TEXT")
    prompt_name: str | None = opt(None, "Name of the prompt in the folder to put before every text.", "NAME")
    calibration: str | None = opt(
        None, "Texts that set the ranges of int8 and uint8. Default: the first part of DATA.", "FILE"
    )
    skip_bad_rows: bool = opt(False, "Leave out rows that cannot be used; an index says which rows are there.")
    resume: bool = opt(False, "Continue an interrupted run after its last complete part.")


@verb("vramfit encode my-embedder reviews.csv --output vectors.npy --memory 2GiB")
def encode(options: EncodeOptions, own: VectorOutput, data: Annotated[str, DATA], json: Json = False) -> None:
    """Write the vectors of all texts of a file, in order, in constant memory; --resume continues an interrupted run.

    Finished parts are kept next to the output, with a manifest; the output file appears when it is complete.

    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when not even one text fits,
    130 when interrupted.
    """
    request = _request(options, own)
    options.look(data, *([own.calibration] if own.calibration is not None else []))
    _look(request, data)
    with working("Encoding"):
        from vramfit.runtime.encoding.encode import encode_to_file

        report = encode_to_file(request, data)
    for line in _remarks(report):
        say(line)
    if json:
        print_json(report)
    else:
        say(f"{counted(report.num_vectors, 'vector')} of {_numbers(report)} in {report.output}", stderr=False)


def _request(options: EncodeOptions, own: VectorOutput) -> EncodeRequest:
    """Both records as one; what contradicts itself is refused here."""
    given = {f.name: getattr(part, f.name) for part in (options, own) for f in fields(part)}
    return EncodeRequest(**given)


def _look(request: EncodeRequest, data: str) -> None:
    """Refuse an output that cannot be written and rows that cannot be used, before torch is imported."""
    from vramfit.runtime.encoding.outputs import look_at_manifest
    from vramfit.runtime.encoding.texts import open_stream, source_of

    request.look_at_output(data)
    look_at_manifest(request.path, resume=request.resume)
    asked: dict[str, Any] = {"text_column": request.text_column, "max_rows": request.max_rows}
    path = Path(data)
    if path.is_file() and path.stat().st_size <= LOOKED_AT_BYTES:
        for _ in open_stream(data, skips=request.skip_bad_rows, **asked).parts():
            pass
    else:
        look_at_columns(source_of(data, request.text_column, request.max_rows, skips=request.skip_bad_rows))


def _remarks(report: "EncodeReport") -> list[str]:
    """What to know of a run, on stderr."""
    lines = [
        f"Computed in {report.arithmetic}" + ("; --exact is fp32" if report.arithmetic not in ("fp32", "int8") else "")
    ]
    if report.prompt:
        lines.append(f"Every text went in after {shown(report.prompt)}")
    if report.num_encoded:
        rate = report.num_encoded / max(report.seconds, 1e-9)
        lines.append(f"{counted(report.num_encoded, 'text')} in {report.seconds:,.1f} s, {rate:,.0f} texts/s")
    if report.num_bad_rows:
        lines.append(f"{counted(report.num_bad_rows, 'row')} left out; the first is {report.first_bad_row}")
    if report.num_truncated:
        texts = "text is" if report.num_truncated == 1 else "texts are"
        lines.append(f"{report.num_truncated:,} {texts} longer than {report.max_length:,} tokens, and cut")
    if report.num_recoveries:
        lines.append(f"Memory ran out {counted(report.num_recoveries, 'time')}; batches were halved, and nothing lost")
    return [*lines, *(f"Note: {note}" for note in report.notes)]


def _numbers(report: "EncodeReport") -> str:
    noun = "byte" if report.dtype.endswith("binary") else "number"
    return f"{counted(report.width, noun)} ({report.dtype})"
