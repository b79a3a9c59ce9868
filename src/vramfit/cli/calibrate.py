"""`vramfit calibrate`: this machine's GPU measured, and kept for later estimates."""

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from vramfit.cli.first_look import look_at_driver
from vramfit.cli.progress import working
from vramfit.cli.terminal import Json, console, print_json, table

if TYPE_CHECKING:
    from vramfit.records.measurement import Calibration

EXAMPLE = "vramfit calibrate"


def run(
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the profile here instead; estimates do not look for it there."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure how fast this machine's GPU and host are, in about a minute, and keep it as a profile.

    Estimates for a GPU of this name use the profile for their step times from then on; memory is not touched by it.
    """
    look_at_driver("run it on a machine with an NVIDIA GPU; without it, estimates use the catalogue's rates")
    calibration = _calibrate()
    from vramfit.timing.profile import save_profile

    path = save_profile(calibration, output)
    if json:
        print_json(calibration)
    else:
        _print(calibration, path)


def _calibrate() -> "Calibration":
    with working("Measuring this machine's GPU, about a minute"):
        from vramfit.devices.catalogue import all_gpus
        from vramfit.estimator.timing import reference_work
        from vramfit.runtime.calibration import calibrate
        from vramfit.timing.profile import with_host_factor

        measured = calibrate()
        known = measured.gpu if any(gpu.name == measured.gpu for gpu in all_gpus()) else None
        return with_host_factor(measured, reference_work(known))


def _print(calibration: "Calibration", path: Path) -> None:
    c, out = calibration, console()
    rates: dict[str, list[float]] = {}
    for product in c.products:
        rates.setdefault(product.dtype, []).append(product.flops_per_s)
    rows = table("measured", "figure", right=("figure",))
    for dtype, found in rates.items():
        low, high = (f"{rate / 1e12:,.4g}" for rate in (min(found), max(found)))
        rows.add_row(f"products, {dtype}", f"{median(found) / 1e12:,.4g} TFLOP/s ({low} to {high})")
    rows.add_row("memory", f"{c.bytes_per_s / 1e9:,.0f} GB/s")
    rows.add_row("from the host", f"{c.transfer_bytes_per_s / 1e9:,.1f} GB/s")
    rows.add_row("a launch", f"{1e6 * c.launch_s:.1f} µs")
    rows.add_row(
        "an operator", f"{1e6 * c.forward_operator_s:.1f} µs forward, {1e6 * c.backward_operator_s:.1f} backward"
    )
    rows.add_row("reference step", f"{1e3 * c.reference_step_s:.1f} ms (host × {c.host_factor:.2f})")
    out.print(f"[bold]{c.reported_name}[/bold]  ({c.gpu}), torch {c.torch_version}")
    out.print(rows)
    out.print(f"Kept in {path}", soft_wrap=True)
