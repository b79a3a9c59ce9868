"""`vramfit predict`: what a saved model says of each row, as JSON lines in the order of the input."""

import json as json_format
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramfit.cli.evaluate import (
    AttentionName,
    Batch,
    Device,
    GPUName,
    MaxRows,
    Memory,
    Model,
    PrecisionName,
    Seq,
    TaskName,
    TextColumn,
    Trust,
    check_precision,
    say_what_was_cut,
)
from vramfit.cli.first_look import look_at_data_for, look_at_file, look_at_gpu, look_at_model
from vramfit.cli.progress import working
from vramfit.cli.terminal import console, write_out
from vramfit.cli.workload_options import parse_names
from vramfit.errors import VramfitError, WorkloadError
from vramfit.records.codec import replace_file
from vramfit.stages import tell

if TYPE_CHECKING:
    from vramfit.runtime.data.source import DataSource

EXAMPLE = "echo 'A film to remember.' | vramfit predict my-model -"


def run(
    model: Model,
    data: Annotated[str, typer.Argument(metavar="DATA", help="A file, or - for standard input: JSON lines or text.")],
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write here, not to stdout.")
    ] = None,
    task: TaskName = None,
    text_column: TextColumn = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, metavar="N", help="Scores of the N best labels or tokens too.")
    ] = None,
    all_scores: Annotated[bool, typer.Option("--all-scores", help="Scores of all labels too.")] = False,
    max_rows: MaxRows = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: PrecisionName = "fp32",
    attention: AttentionName = None,
    memory: Memory = None,
    gpu: GPUName = None,
    device: Device = None,
    trust_remote_code: Trust = False,
    json: Annotated[bool, typer.Option("--json", help="JSON lines are all there is; for uniformity.")] = False,
) -> None:
    """Predict every row of a file; a row that cannot be used gives {"row": …, "error": …} in its place.

    row is the line that a row begins on, from 1: the first below a header is 2. index counts the rows of data from 0.

    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when not even one sample fits,
    130 when interrupted.
    """
    if top_k is not None and all_scores:
        raise typer.BadParameter("--top-k and --all-scores both say how many scores there are: give one")
    check_precision(precision)
    look_at_gpu(gpu)
    look_at_model(model)
    look_at_file(data)
    if output is not None:
        _check_output(Path(output), data)

    def source(task: str) -> "DataSource":
        from vramfit.runtime.data.source import DataSource

        columns = parse_names(text_column)
        return DataSource(
            path=data, task=task, text_columns=columns, needs_labels=False, skip_bad_rows=True, max_rows=max_rows
        )

    look_at_data_for(model, source, task)
    with _unwritten(output), working("Reading"):
        from vramfit.runtime.device import RunDevice
        from vramfit.runtime.trained import open_model

        trained = open_model(model, task=task, seq=seq, trust_remote_code=trust_remote_code)
        trained.check_head()
        wanted = _num_scores(trained, top_k, all_scores)
        rows = source(trained.task)
        run_device = RunDevice(device, memory=memory)
        chosen = trained.attention(run_device, precision, attention, gpu)
        parts = trained.read_ahead(rows) if chosen == "packed" else iter([trained.read(rows)])
        first = next(parts)
    found: list[dict[str, Any]] = []
    read: list[Any] = []
    with _unwritten(output), working("Predicting"):
        kind: Any = precision

        def take(samples: Any, output: Any, batch: Any, numbers: list[int]) -> None:
            references = [samples.references[i] | {"top_k": wanted} for i in numbers]
            found.extend(trained.kind.predictions(output, batch, references, trained.tokenizing))

        def pass_on() -> Iterator[Any]:
            for samples in chain([first], parts):
                read.append(samples)
                yield samples

        whole = None if chosen == "packed" else first
        inference = trained.load(
            run_device, whole, memory=memory, gpu=gpu, batch=batch, precision=kind, attention=chosen
        )
        inference.run_parts(pass_on(), take, lambda done: tell(f"{done:,} done"))
    for note in trained.notes_on(first):
        console(stderr=True).print(f"Note: {note}", markup=False, soft_wrap=True)
    say_what_was_cut(*read)
    found = trained.kind.merged(found)
    bad = [{"row": row.row, "index": row.index, "error": row.what} for row in first.bad_rows]
    _write(sorted([*found, *bad], key=lambda row: row["index"]), output)


def _num_scores(trained: Any, top_k: int | None, all_scores: bool) -> int | None:
    """How many scores are given; None for the best alone."""
    from vramfit.tasks.parts.results import wrong_top_k

    if all_scores and not trained.label_names:
        most = trained.kind.max_scores
        more = f": take --top-k, up to {most}" if most is not None else ""
        raise WorkloadError([f"--all-scores is for models with labels, and this one does {trained.task}{more}"])
    if all_scores:
        return len(trained.label_names)
    wrong = None if top_k is None else wrong_top_k(top_k, trained.task)
    if wrong is not None:
        raise WorkloadError([wrong])
    return top_k


@contextmanager
def _unwritten(output: str | None) -> Iterator[None]:
    """Inside, Ctrl-C says that there is no output yet."""
    try:
        yield
    except KeyboardInterrupt:
        said = "" if output is None else f"nothing was written to {output}, which is written at the end"
        raise KeyboardInterrupt(said) from None


def _write(rows: list[dict[str, Any]], output: str | None) -> None:
    lines = (json_format.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if output is not None:
        with _unwritten(output):
            replace_file(Path(output), "".join(lines).encode())
        return
    num_written = 0
    try:
        for line in lines:
            write_out(line)
            num_written += 1
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{num_written:,} of {len(rows):,} rows were written to stdout") from None


def _check_output(output: Path, data: str) -> None:
    """Refuse what cannot be written before anything is predicted."""
    if output.is_dir() or not output.parent.is_dir():
        what = "it is a folder" if output.is_dir() else "there is no such folder"
        raise VramfitError(f"cannot write {output}: {what}", hint="choose a place you can write to")
    if output.exists() and Path(data).exists() and output.samefile(data):
        raise VramfitError(f"{output} is the data: predictions would overwrite it", hint="choose another --output")
