"""`vramfit evaluate`: the metrics of a saved model on a file."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramfit.cli.first_look import look_at_data_for, look_at_file, look_at_gpu, look_at_model
from vramfit.cli.progress import working
from vramfit.cli.terminal import Json, console, print_json
from vramfit.cli.workload_options import parse_names
from vramfit.errors import WorkloadError
from vramfit.stages import tell
from vramfit.tasks import find_task
from vramfit.units import counted
from vramfit.workload import CHOICES

if TYPE_CHECKING:
    from vramfit.runtime.data.source import DataSource

EXAMPLE = "vramfit evaluate my-model dev.csv --memory 2GiB"

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder that vramfit train or transformers saved.")]
TaskName = Annotated[str | None, typer.Option("--task", metavar="NAME", help="The head; else the model's own.")]
TextColumn = Annotated[
    str | None, typer.Option("--text-column", metavar="NAME,…", help="Column of the texts; two for pairs.")
]
Batch = Annotated[
    int | None, typer.Option("--batch", min=1, metavar="N", help="Samples of full length; else what fits.")
]
Seq = Annotated[int | None, typer.Option("--seq", min=1, metavar="N", help="Cut sequences at so many tokens.")]
PrecisionName = Annotated[str, typer.Option("--precision", metavar="NAME", help="Arithmetic.")]
AttentionName = Annotated[
    str | None,
    typer.Option("--attention", metavar="NAME", help="sdpa, eager or packed; else packed where a GPU has its kernel."),
]
Memory = Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="What PyTorch may reserve.")]
GPUName = Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="Choose the batch for this GPU.")]
Device = Annotated[str | None, typer.Option("--device", metavar="NAME", help="cuda, cuda:N, cpu or emulated.")]
MaxRows = Annotated[int | None, typer.Option("--max-rows", min=1, metavar="N", help="Read no more rows.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own Python code.")]


def run(
    model: Model,
    data: Annotated[str, typer.Argument(metavar="DATA", help="CSV, TSV, JSON lines, or - for standard input.")],
    task: TaskName = None,
    text_column: TextColumn = None,
    label_column: Annotated[str | None, typer.Option(metavar="NAME", help="Column of the labels.")] = None,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Leave out rows that cannot be used.")] = False,
    max_rows: MaxRows = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: PrecisionName = "fp32",
    attention: AttentionName = None,
    memory: Memory = None,
    gpu: GPUName = None,
    device: Device = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Evaluate a saved model; the batch is chosen to fit, and halved where memory runs out.

    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when not even one sample fits,
    130 when interrupted.
    """
    check_precision(precision)
    look_at_gpu(gpu)
    look_at_model(model)
    look_at_file(data)

    def source(task: str) -> "DataSource":
        from vramfit.runtime.data.source import DataSource

        return DataSource(
            path=data,
            task=task,
            text_columns=parse_names(text_column),
            label_column=label_column,
            skip_bad_rows=skip_bad_rows,
            max_rows=max_rows,
        )

    look_at_data_for(model, source, task)
    with working("Reading"):
        from vramfit.runtime.data.samples import make_metrics
        from vramfit.runtime.device import RunDevice
        from vramfit.runtime.trained import open_model

        trained = open_model(model, task=task, seq=seq, trust_remote_code=trust_remote_code)
        trained.check_head()
        samples = trained.read(source(trained.task))
        metrics = make_metrics(samples)
        run_device = RunDevice(device, memory=memory)
    say_what_was_cut(samples)
    with working("Evaluating"):
        kind: Any = precision
        chosen = trained.attention(run_device, precision, attention, gpu)
        inference = trained.load(
            run_device, samples, memory=memory, gpu=gpu, batch=batch, precision=kind, attention=chosen
        )
        inference.run(
            samples,
            lambda output, rows, numbers: metrics.update(output, rows, [samples.references[i] for i in numbers]),
            lambda done, total: tell(f"{done:,} of {total:,} done"),
        )
    read: dict[str, Any] = {"num_samples": len(samples), "num_bad_rows": len(samples.bad_rows)}
    result = {**read, **metrics.result(), "notes": trained.notes_on(samples)}
    if json:
        print_json({**result, "num_recoveries": inference.num_recoveries, "reserved_bytes": run_device.reserved_bytes})
        return
    from vramfit.report.run import render_metrics

    console().print(render_metrics(result))


def check_precision(precision: str) -> None:
    """Refuse a name that is no precision, before anything heavy is imported."""
    if precision not in CHOICES["precision"]:
        raise WorkloadError([f"precision {precision!r} is not one of {', '.join(CHOICES['precision'])}"])


def say_what_was_cut(*parts: Any) -> None:
    """Rows left out and samples cut, on stderr.

    Args:
        parts: the samples, as one or in parts; each part knows all bad rows.
    """
    err = console(stderr=True)
    bad_rows = parts[0].bad_rows
    if bad_rows:
        err.print(
            f"{counted(len(bad_rows), 'row')} cannot be used; the first is row {bad_rows[0].row}: {bad_rows[0].what}",
            markup=False,
            soft_wrap=True,
        )
    num_truncated = sum(samples.num_truncated for samples in parts)
    if num_truncated:
        are, were = ("is", "was") if num_truncated == 1 else ("are", "were")
        longest = max(max(samples.lengths) for samples in parts)
        before = max(samples.longest_before_truncation for samples in parts)
        how = find_task(parts[0].task).long_texts
        err.print(
            f"{counted(num_truncated, 'row')} {are} longer than {longest:,} tokens and {were} {how}; "
            f"the longest has {before:,}",
            soft_wrap=True,
        )
    sys.stderr.flush()
