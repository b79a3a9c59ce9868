"""`vramfit gpus`: the GPUs vramfit can predict for, or one of them in full."""

from typing import Annotated

import typer

from vramfit.cli.terminal import Json, console, print_aligned, print_json, table
from vramfit.devices.catalogue import GPU, all_gpus, all_instances, find_gpu
from vramfit.units import format_bytes

EXAMPLE = "vramfit gpus a100-80gb"
RATES = ("fp32", "tf32", "fp16", "bf16", "fp8")


def run(
    name: Annotated[str | None, typer.Argument(help="A GPU or a cloud instance; all GPUs without it.")] = None,
    json: Json = False,
) -> None:
    """List the GPU catalogue: memory as CUDA reports it, architecture, speed, and where each figure comes from."""
    if name is None:
        gpus = all_gpus()
        if json:
            print_json(gpus)
        else:
            _print_list(gpus)
        return
    gpu = find_gpu(name)
    if json:
        print_json([gpu])
    else:
        _print_one(gpu)


def _print_list(gpus: tuple[GPU, ...]) -> None:
    numbers = ("memory", "SMs", "GB/s", *RATES)
    rows = [
        (
            gpu.name,
            _memory(gpu),
            gpu.sm,
            str(gpu.num_multiprocessors),
            _scaled(gpu.memory_bandwidth_bytes_per_s, 1e9),
            *(_scaled(getattr(gpu, f"peak_{rate}"), 1e12) for rate in RATES),
        )
        for gpu in gpus
    ]
    print_aligned(("GPU", "memory", "arch", "SMs", "GB/s", *RATES), rows, right=numbers, spare=("fp8", "tf32"))
    console().print(
        f"\n{len(gpus)} GPUs. Memory as CUDA reports it (~ where only the nominal size is known); "
        "rates in dense TFLOP/s; – where the GPU lacks it or no source is known.",
        style="dim",
    )


def _print_one(gpu: GPU) -> None:
    out = console()
    rows = table("figure", "value", "source")
    facts = [
        ("memory", "total_memory_bytes", f"{_memory(gpu)}  ({gpu.total_memory_bytes:,} bytes)"),
        ("architecture", "compute_capability", gpu.sm),
        ("multiprocessors", "num_multiprocessors", str(gpu.num_multiprocessors)),
        (
            "bandwidth",
            "memory_bandwidth_bytes_per_s",
            _scaled(gpu.memory_bandwidth_bytes_per_s, 1e9) + " GB/s",
        ),
        *(
            (rate, f"peak_{rate}", _scaled(getattr(gpu, f"peak_{rate}"), 1e12) + " TFLOP/s")
            for rate in RATES
            if getattr(gpu, f"peak_{rate}") is not None
        ),
    ]
    rows.columns[2].no_wrap = False
    for label, field, value in facts:
        rows.add_row(label, value, gpu.source_of(field))
    out.print(f"[bold]{gpu.title}[/bold]  ({gpu.name}, {gpu.kind})")
    out.print(rows)
    instances = [i for i in all_instances() if i.gpu == gpu.name]
    if instances:
        names = ", ".join(f"{i.name} ×{i.num_gpus}" for i in instances)
        out.print(f"\nIn the cloud: {names}")


def _memory(gpu: GPU) -> str:
    return ("~" if gpu.memory_basis == "nominal" else "") + format_bytes(gpu.total_memory_bytes)


def _scaled(figure: float | None, unit: float) -> str:
    return "–" if figure is None else f"{figure / unit:,.4g}"
