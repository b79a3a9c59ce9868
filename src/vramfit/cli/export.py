"""`vramfit export`: a model as ONNX files."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from vramfit.cli.options import Json, opt, verb
from vramfit.cli.terminal import console, print_json, say, table, working
from vramfit.cli.trim import SourceOptions
from vramfit.units import format_bytes

if TYPE_CHECKING:
    from vramfit.smaller.export import ExportReport

INT8 = ("dynamic", "static")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Which files are written, and what they may differ by."""

    int8: str | None = opt(
        None, "Write an int8 file too: dynamic, or static with ranges calibrated on the rows of --data.", "NAME"
    )
    max_changed: float = opt(0.05, "Largest share of rows whose answer may differ in int8.", "SHARE", min=0.0, max=1.0)
    accept: bool = opt(False, "Write the files even if their answers differ by more than allowed.")


@verb("vramfit export my-model --data dev.csv --int8 dynamic --output my-model-onnx")
def export(options: SourceOptions, own: ExportOptions, json: Json = False) -> None:
    """Export a model to ONNX in fp32 and int8, for faster inference on CPUs, and check its answers.

    The folder has configuration and tokenizer too: vramfit encode, predict, evaluate and serve run it with ONNX Runtime
    on the CPU, the int8 file where there is one; optimum and sentence-transformers find onnx/model.onnx.

    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 130 when interrupted.
    """
    if own.int8 is not None and own.int8 not in INT8:
        raise typer.BadParameter(f"--int8 {own.int8!r} is not one of {', '.join(INT8)}")
    options.look()
    with working("Exporting"):
        from vramfit.smaller.export import ExportRequest
        from vramfit.smaller.export import export as run

        report = run(ExportRequest(**options.taken, int8=own.int8, max_changed=own.max_changed, accept=own.accept))
    if json:
        print_json(report)
    else:
        _show(report)


def _show(report: "ExportReport") -> None:
    has_vectors = report.versions[0].least_cosine is not None
    same = "least cosine" if has_vectors else "other answers"
    columns = ("", "file", "size", "max difference", same, "one row", "rows/s")
    shown = table(*columns, right=columns[2:])
    for version in report.versions:
        shown.add_row(
            version.name,
            version.file or "–",
            format_bytes(version.num_bytes),
            f"{version.max_difference:.2g}",
            f"{version.least_cosine:.4f}" if version.least_cosine is not None else f"{version.num_changed:,}",
            f"{version.latency_s * 1000:.1f} ms",
            f"{version.rows_per_s:,.0f}",
        )
    console().print(shown)
    for problem in report.problems:
        say(f"Accepted: {problem}")
    threads = "thread" if report.num_threads == 1 else "threads"
    say(
        f"Compared on {report.num_rows:,} rows; timed in turns with {report.num_threads} {threads}. In {report.output}",
        stderr=False,
    )
