"""`vramfit measure`: the job run for real on this machine's GPU, beside its prediction."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramfit.cli.first_look import is_path, look_at_driver
from vramfit.cli.progress import working
from vramfit.cli.terminal import Json, console, print_json
from vramfit.cli.workload_options import WorkloadOptions, takes_workload
from vramfit.models.catalogue import find_entry
from vramfit.settings import having
from vramfit.units import counted

if TYPE_CHECKING:
    from vramfit.records.estimate import Estimate
    from vramfit.records.measurement import Measurement

EXAMPLE = "vramfit measure bert-base-uncased --batch 16 --seq 512 --precision amp-bf16"
DOES_NOT_FIT = 3
DISAGREES = 4


@takes_workload(without=(*having(is_measured=False), "torch_version", "trust_remote_code"))
def run(
    options: WorkloadOptions,
    steps: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Steps to run.")] = 3,
    tolerance: Annotated[
        float,
        typer.Option(min=0.0, metavar="X", help="Largest error of an allocated or reserved peak, as a fraction."),
    ] = 0.01,
    json: Json = False,
) -> None:
    """Run a job for real in a fresh process and show predicted beside measured, phase by phase.

    Exit codes: 0 when they agree, 1 for an error, 2 for a wrong name or value,
    3 when it runs out of memory as predicted, 4 when they differ by more than the tolerance.
    """
    keywords = options.keywords()
    if is_path(options.model) or find_entry(options.model) is not None:  # a wrong name needs no GPU to be told
        look_at_driver("run it on a machine with an NVIDIA GPU; `vramfit estimate` predicts without one")
    measurement = _measure(options.model, keywords, steps)
    predicted = _predict(options.model, keywords, measurement)
    from vramfit.records.measurement import compare

    comparison = compare(predicted, measurement, tolerance=tolerance)
    if json:
        print_json(comparison)
    else:
        from vramfit.report.measurement import render_comparison

        console().print(render_comparison(comparison))
    if not comparison.agrees:
        raise typer.Exit(DISAGREES)
    if measurement.out_of_memory is not None:
        raise typer.Exit(DOES_NOT_FIT)


def _measure(model: str, keywords: dict[str, Any], steps: int) -> "Measurement":
    from vramfit.workload import Workload

    workload = Workload.from_keywords(model=model, **keywords)
    with working(f"Running {model} for {counted(steps, 'step')}"):
        from vramfit.models.resolve import resolve
        from vramfit.runtime.measurement import measure

        resolve(model, task=workload.task, num_labels=workload.num_labels)
        return measure(workload, num_steps=steps)


def _predict(model: str, keywords: dict[str, Any], measurement: "Measurement") -> "Estimate":
    """For the GPU that was measured, unless another was named."""
    from vramfit.devices.catalogue import match_gpu
    from vramfit.errors import UnknownGPU

    gpu = match_gpu(measurement.gpu, measurement.total_memory_bytes)
    name = keywords.get("gpu") or (gpu.name if gpu else None)
    if name is None:
        raise UnknownGPU(
            f"the GPU of this machine, {measurement.gpu}, is not in the catalogue",
            hint="name the one that is nearest with --gpu; `vramfit gpus` lists them",
        )
    with working(f"Predicting {model}"):
        from vramfit.estimator.predict import estimate

        return estimate(model, **{**keywords, "gpu": name})
