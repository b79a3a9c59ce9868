"""`vramfit estimate`, `max-batch`, `measure`, `receipts`, `calibrate` and `report`: what a job takes, predicted and
measured."""

import webbrowser
from contextlib import nullcontext
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramfit.cli.first_look import is_path, look_at_driver
from vramfit.cli.options import Json, ReceiptFile, WorkloadOptions, argument, option, verb
from vramfit.cli.terminal import DISAGREES, DOES_NOT_FIT, console, leave, print_json, say, show, table, working
from vramfit.errors import UnknownGPU, VramfitError
from vramfit.models.catalogue import find_entry
from vramfit.records.codec import check_place, replace_file
from vramfit.records.estimate import FIGURES
from vramfit.records.measurement import Calibration, Measurement, compare
from vramfit.records.receipt import Receipt, read_receipt
from vramfit.report.estimate import render_estimate
from vramfit.report.html.page import plotly_script, render_report
from vramfit.report.html.subject import NOT_PREDICTED, Subject, read_subject
from vramfit.report.run import render_comparison, render_receipts
from vramfit.report.sizes import render_max_batch, render_table
from vramfit.settings import having
from vramfit.stages import tell, within
from vramfit.units import counted, format_bytes
from vramfit.workload import Workload

if TYPE_CHECKING:
    from vramfit.records.estimate import Advice, Estimate

REFUSED = 1
"""The exit code where a receipt is refused."""
MAX_RECEIPTS = 10_000


@verb("vramfit estimate bert-base-uncased --batch 8 --seq 512 --gpu t4", tables=True)
def estimate(
    options: WorkloadOptions,
    figure: Annotated[str, option(f"Figure in a table: {', '.join(FIGURES)}.", "FIGURE", "--show")] = "allocated",
    snapshot: Annotated[
        Path | None, option("Write the predicted allocations for PyTorch's memory visualiser.", "FILE")
    ] = None,
    no_advice: Annotated[bool, option("Do not show what single changes would save.", None, "--no-advice")] = False,
    json: Json = False,
) -> None:
    """Predict the GPU memory of a job, usually to the byte: how much, when and why; needs no GPU and no weights.

    Several batches or lengths give a table.
    Exit codes: 0 when it fits (a table: when any cell fits), 1 for an error, 2 for a wrong name or value, 3 when not.
    """
    options.check()
    cells = options.cells()
    if figure not in FIGURES:
        raise typer.BadParameter(f"--show {figure!r} is not one of {', '.join(FIGURES)}")
    if snapshot is not None and len(cells) > 1:
        raise typer.BadParameter(f"--snapshot holds one stream, and this is a table of {len(cells)}")
    is_one = len(cells) == 1
    estimates, advice = _predict(options.model, cells, is_one and not no_advice and not json)
    show(
        estimates,
        lambda _: render_estimate(estimates[0], advice) if is_one else render_table(estimates, figure),
        json=json,
    )
    if snapshot is not None:
        estimates[0].save_snapshot(snapshot)
        say(f"Wrote the predicted stream to {snapshot}; https://pytorch.org/memory_viz shows it.")
    if all(e.fits is False for e in estimates):
        leave(DOES_NOT_FIT)


def _predict(
    model: str, cells: list[dict[str, Any]], wants_advice: bool
) -> tuple[list["Estimate"], "list[Advice] | None"]:
    """One estimate a cell, and advice for a single one."""
    with working(f"Predicting {model}"):
        from vramfit.estimator.predict import advise, estimate

        estimates: list[Estimate] = []
        with within(lambda: f"{len(estimates)} of {len(cells)} done") if len(cells) > 1 else nullcontext():
            estimates.extend(estimate(model, **keywords) for keywords in cells)
        with within(lambda: "what changes would save"):
            return estimates, advise(model, **cells[0]) if wants_advice else None


@verb(
    "vramfit max-batch bert-large-uncased --seq 512 --precision amp-fp16 --gpu t4",
    without=("batch", "micro_batch", "lengths"),
)
def max_batch(options: WorkloadOptions, json: Json = False) -> None:
    """Find the largest batch that fits, what stops the next one, and which smaller ones do not fit.

    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when not even one sample fits.
    """
    keywords = options.keywords()
    with working(f"Searching the largest batch of {options.model}"):
        from vramfit.planner.choose import max_batch

        found = max_batch(options.model, **keywords)
    show(found, render_max_batch, json=json)
    if not found.batch:
        leave(DOES_NOT_FIT)


@verb(
    "vramfit measure bert-base-uncased --batch 16 --seq 512 --precision amp-bf16",
    without=(*having(is_measured=False), "torch_version", "trust_remote_code"),
    defaults={"max_grad_norm": "not clipped"},
)
def measure(
    options: WorkloadOptions,
    steps: Annotated[int, option("Steps to run.", "N", min=1, max=1000)] = 3,
    tolerance: Annotated[
        float, option("Largest error of an allocated or reserved peak, as a fraction.", "X", min=0.0)
    ] = 0.01,
    receipt: ReceiptFile = None,
    json: Json = False,
) -> None:
    """Run a job in a fresh process and compare its memory with the prediction, phase by phase.

    Exit codes: 0 when they agree, 1 for an error, 2 for a wrong name or value,
    3 when it runs out of memory as predicted, 4 when they differ by more than the tolerance.
    """
    keywords = options.keywords()
    if receipt is not None:
        check_place(receipt, options.model, what="the receipt")
    if is_path(options.model) or find_entry(options.model) is not None:  # a wrong name needs no GPU to be told
        look_at_driver("run it on a machine with an NVIDIA GPU; `vramfit estimate` predicts without one")
    first = _predict_first(options.model, keywords) if receipt is not None else None
    measurement = _measure(options.model, keywords, steps)
    predicted = _predict_for(measurement, options.model, keywords, first)
    if receipt is not None:
        _write_receipt(predicted, measurement, receipt)
    comparison = compare(predicted, measurement, tolerance=tolerance)
    show(comparison, render_comparison, json=json)
    if not comparison.agrees:
        leave(DISAGREES)
    if measurement.out_of_memory is not None:
        leave(DOES_NOT_FIT)


def _measure(model: str, keywords: dict[str, Any], steps: int) -> Measurement:
    workload = Workload.from_keywords(model=model, **keywords)
    with working(f"Running {model} for {counted(steps, 'step')}"):
        from vramfit.models.resolve import resolve
        from vramfit.runtime.measurement import measure

        resolve(model, task=workload.task, num_labels=workload.num_labels)
        return measure(workload, num_steps=steps)


def _predict_first(model: str, keywords: dict[str, Any]) -> "Estimate | None":
    """The prediction before the run, for the GPU named or the first one present; None where that is not known."""
    from vramfit.devices.probe import probe

    present = next((gpu.catalogue_gpu for gpu in probe() if gpu.catalogue_gpu is not None), None)
    name = keywords.get("gpu") or (present.name if present else None)
    return None if name is None else _predict(model, [{**keywords, "gpu": name}], wants_advice=False)[0][0]


def _write_receipt(predicted: "Estimate", measurement: Measurement, path: Path) -> None:
    from vramfit.records.receipt import write_receipt
    from vramfit.runtime.receipts import receipt_of_measurement

    write_receipt(receipt_of_measurement(predicted, measurement), path)
    say(f"Wrote the receipt {path}.")


def _predict_for(
    measurement: Measurement, model: str, keywords: dict[str, Any], first: "Estimate | None"
) -> "Estimate":
    """For the GPU that was measured, unless another was named; what was predicted before the run, where it is that."""
    from vramfit.devices.catalogue import find_gpu, match_gpu

    gpu = match_gpu(measurement.gpu, measurement.total_memory_bytes)
    name = keywords.get("gpu") or (gpu.name if gpu else None)
    if name is None:
        raise UnknownGPU(
            f"the GPU of this machine, {measurement.gpu}, is not in the catalogue",
            hint="name the one that is nearest with --gpu; `vramfit gpus` lists them",
        )
    if first is not None and first.gpu == find_gpu(name).name:
        return first
    (predicted,), _ = _predict(model, [{**keywords, "gpu": name}], wants_advice=False)
    return predicted


@verb("vramfit calibrate")
def calibrate(
    output: Annotated[
        Path | None, option("Write the profile here instead; estimates do not look for it there.", "FILE")
    ] = None,
    json: Json = False,
) -> None:
    """Measure how fast this machine's GPU and host are, in about a minute, and keep it as a profile.

    Estimates for a GPU of this name then take their step times from the profile; memory predictions do not change.
    """
    look_at_driver("run it on a machine with an NVIDIA GPU; without it, estimates use the catalogue's rates")
    calibration = _calibrate()
    from vramfit.timing.model import save_profile

    path = save_profile(calibration, output)
    if json:
        print_json(calibration)
    else:
        _print(calibration, path)


def _calibrate() -> Calibration:
    with working("Measuring this machine's GPU, about a minute"):
        from vramfit.devices.catalogue import all_gpus
        from vramfit.estimator.predict import reference_work
        from vramfit.runtime.calibration import calibrate
        from vramfit.timing.model import with_host_factor

        measured = calibrate()
        known = measured.gpu if any(gpu.name == measured.gpu for gpu in all_gpus()) else None
        return with_host_factor(measured, reference_work(known))


def _print(c: Calibration, path: Path) -> None:
    out, rows = console(), table("measured", "figure", right=("figure",))
    rates: dict[str, list[float]] = {}
    for product in c.products:
        rates.setdefault(product.dtype, []).append(product.flops_per_s)
    for dtype, found in rates.items():
        low, high = (f"{rate / 1e12:,.4g}" for rate in (min(found), max(found)))
        rows.add_row(f"products, {dtype}", f"{median(found) / 1e12:,.4g} TFLOP/s ({low} to {high})")
    rows.add_row("memory", f"{c.bytes_per_s / 1e9:,.0f} GB/s")
    rows.add_row("from the host", f"{c.transfer_bytes_per_s / 1e9:,.1f} GB/s")
    rows.add_row("a launch", f"{1e6 * c.launch_s:.1f} µs")
    forward, backward = 1e6 * c.forward_operator_s, 1e6 * c.backward_operator_s
    rows.add_row("an operator", f"{forward:.1f} µs forward, {backward:.1f} backward")
    rows.add_row("reference step", f"{1e3 * c.reference_step_s:.1f} ms (host × {c.host_factor:.2f})")
    out.print(f"[bold]{c.reported_name}[/bold]  ({c.gpu}), torch {c.torch_version}")
    out.print(rows)
    out.print(f"Kept in {path}", soft_wrap=True)


FILE_NAME = "report.html"


@verb("vramfit report my-model --output report.html")
def report(
    source: Annotated[
        Path, argument("The folder of a run, or JSON of an estimate, a plan, a measurement, a comparison.", "RUN")
    ],
    output: Annotated[
        Path | None, option("Where to write. Default: report.html in the folder, or next to the file.", "FILE")
    ] = None,
    no_grid: Annotated[
        bool, option("Leave out the map of batches and lengths, which takes some seconds.", None, "--no-grid")
    ] = False,
    open_browser: Annotated[bool, option("Open it in the browser.", None, "--open")] = False,
    json: Json = False,
) -> None:
    """Write a run, a plan, an estimate or a measurement as one HTML file that needs no network.

    It shows the memory of a step by category, predicted over measured where a step was recorded; what is alive at the
    peak by module; what fits by batch and length; a plan's alternatives; loss, scores and throughput of a run.
    """
    subject = read_subject(source)
    plotly_script()
    path = output or (source / FILE_NAME if source.is_dir() else source.with_suffix(".html"))
    if not no_grid:
        subject = _predicted(subject)
    content = render_report(subject, made_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")).encode()
    replace_file(path, content)
    if json:
        print_json({"report": str(path), "num_bytes": len(content), "notes": subject.notes})
    else:
        say(f"Wrote {path}, {format_bytes(len(content))}.", stderr=False)
    if open_browser:
        webbrowser.open(path.resolve().as_uri())


def _predicted(subject: Subject) -> Subject:
    """The subject with what has to be predicted for it; where that cannot be done, it says why."""
    workload = subject.workload
    if workload is None:
        return subject
    with working("Predicting"):
        from vramfit.estimator.predict import estimate
        from vramfit.estimator.search import fit_grid

        try:
            if subject.estimate is None:
                subject = replace(subject, estimate=estimate(workload.model, **_keywords(workload)))
            course = subject.course
            if course is not None and subject.course_estimate is None:
                keywords = {**_keywords(workload), **course.size}
                subject = replace(subject, course_estimate=estimate(workload.model, **keywords))
            grid = fit_grid(workload, on_cell=lambda done, total: tell(f"batches and lengths, {done} of {total} done"))
            return replace(subject, grid=grid)
        except VramfitError as error:
            return replace(subject, notes=(*subject.notes, f"{NOT_PREDICTED}: {error}"))


def _keywords(workload: Workload) -> dict[str, object]:
    return {f.name: getattr(workload, f.name) for f in fields(workload) if f.name != "model"}


@verb("vramfit receipts receipts")
def receipts(
    folder: Annotated[Path, argument("A folder of receipts, or one receipt.", "FOLDER")],
    repeat: Annotated[
        bool,
        option("Predict every job again; refuse a receipt of these versions that differs.", None, "--repeat"),
    ] = False,
    json: Json = False,
) -> None:
    """Show receipts of `measure` and `train` as tables of predicted and measured figures, by card.

    Receipts that are damaged, were edited or hold impossible figures are refused, with the reason.
    The digest detects damage; it is not a signature.
    Exit codes: 0 when all are good, 1 when one is refused or there is none, 2 for a wrong name or value.
    """
    good, refused = read_folder(folder)
    if repeat:
        refused |= {name: why for name, why in _repeated(good).items() if why}
    kept = [receipt for name, receipt in good.items() if name not in refused]
    for name, why in refused.items():
        say(f"Refused {name}: {why}.", style="red")
    if json:
        print_json({"receipts": kept, "refused": refused})
    elif kept:
        show(kept, render_receipts, json=False)
    if refused:
        leave(REFUSED)


def read_folder(folder: Path) -> tuple[dict[str, Receipt], dict[str, str]]:
    """File name → receipt, and file name → why it is refused.

    Raises:
        VramfitError: no such folder, or nothing in it.
    """
    if not folder.exists():
        raise VramfitError(f"no such folder: {folder}", hint="vramfit measure … --receipt FILE writes a receipt")
    paths = sorted(folder.glob("*.json"))[:MAX_RECEIPTS] if folder.is_dir() else [folder]
    if not paths:
        raise VramfitError(
            f"{folder} has no receipts: no file in it ends with .json",
            hint="vramfit measure … --receipt FILE writes one",
        )
    good: dict[str, Receipt] = {}
    refused: dict[str, str] = {}
    for path in paths:
        try:
            good[path.name] = read_receipt(path)
        except VramfitError as error:
            refused[path.name] = str(error)
    return good, refused


def _repeated(good: dict[str, Receipt]) -> dict[str, str]:
    """File name → why a receipt cannot be what it says; empty for a good one, whose prediction is said."""
    found: dict[str, str] = {}
    with working(f"Predicting {counted(len(good), 'job')} again"):
        from vramfit.runtime.receipts import card_problems, repeat_prediction

        for name, receipt in good.items():
            words, is_possible = repeat_prediction(receipt)
            problems = [] if receipt.is_emulated else list(card_problems(receipt))
            found[name] = "; ".join([*problems, *([] if is_possible else [words])])
            say(f"{name}: {words}")
    return found
