"""`vramfit gpus` and `vramfit models`: what vramfit can predict for, listed, or one of them in full."""

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from vramfit.cli.options import Json, Trust, checked_choice, option, verb
from vramfit.cli.terminal import console, print_aligned, print_json, table, working
from vramfit.devices.catalogue import GPU, all_gpus, all_instances, context_of, find_gpu
from vramfit.errors import MissingExtra
from vramfit.models.catalogue import USES, CatalogueEntry, all_entries
from vramfit.tasks import encoder_alone
from vramfit.units import format_bytes

if TYPE_CHECKING:
    from vramfit.models.anatomy import ModelCard
    from vramfit.models.resolve import ResolvedModel

RATES = ("fp32", "tf32", "fp16", "bf16", "fp8")
LABEL_WIDTH = 16
BOUND = "an upper bound: what it takes after a whole step is not known for this GPU"


@verb("vramfit gpus a100-80gb")
def gpus(
    name: Annotated[str | None, typer.Argument(help="A GPU or a cloud instance; all GPUs without it.")] = None,
    json: Json = False,
) -> None:
    """List the GPU catalogue: memory as CUDA reports it, architecture, speed, and where each figure comes from."""
    found = all_gpus() if name is None else (find_gpu(name),)
    if json:
        print_json(found)
    elif name is None:
        _print_list(found)
    else:
        _print_one(*found)


@verb("vramfit models bert-base-uncased")
def models(
    name: Annotated[
        str | None, typer.Argument(help="A catalogue name, a folder with config.json, or a hub id.")
    ] = None,
    task: Annotated[str, option("Count the parameters with this head.")] = encoder_alone().name,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """List the model catalogue, or show one: layers, sizes, parameters by part, bytes in each precision."""
    card = None if name is None else _make_card(name, task, trust_remote_code)
    if json:
        print_json(all_entries() if card is None else [card])
    elif card is None:
        _print_models(all_entries())
    else:
        _print_card(card)


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
        ("CUDA context", "context_bytes", _context(gpu)),
        ("architecture", "compute_capability", gpu.sm),
        ("multiprocessors", "num_multiprocessors", str(gpu.num_multiprocessors)),
        ("bandwidth", "memory_bandwidth_bytes_per_s", _scaled(gpu.memory_bandwidth_bytes_per_s, 1e9) + " GB/s"),
        *(
            (rate, f"peak_{rate}", _scaled(getattr(gpu, f"peak_{rate}"), 1e12) + " TFLOP/s")
            for rate in RATES
            if getattr(gpu, f"peak_{rate}") is not None
        ),
    ]
    rows.columns[2].no_wrap = False
    for label, field, value in facts:
        rows.add_row(label, value, gpu.source_of(field) or BOUND)
    out.print(f"[bold]{gpu.title}[/bold]  ({gpu.name}, {gpu.kind})")
    out.print(rows)
    instances = [i for i in all_instances() if i.gpu == gpu.name]
    if instances:
        names = ", ".join(f"{i.name} ×{i.num_gpus}" for i in instances)
        out.print(f"\nIn the cloud: {names}")


def _context(gpu: GPU) -> str:
    context_bytes, basis = context_of(gpu)
    return f"{'≤ ' if basis == 'bounded' else ''}{format_bytes(context_bytes, digits=0)}  ({basis})"


def _memory(gpu: GPU) -> str:
    return ("~" if gpu.memory_basis == "nominal" else "") + format_bytes(gpu.total_memory_bytes)


def _scaled(figure: float | None, unit: float) -> str:
    return "–" if figure is None else f"{figure / unit:,.4g}"


def _print_models(entries: tuple[CatalogueEntry, ...]) -> None:
    numbers = ("layers", "hidden", "heads", "positions", "vocabulary", "parameters")
    rows: list[tuple[str, ...]] = []
    above: dict[int, str] = {}
    for use, title in USES.items():
        above[len(rows)] = title
        rows += [
            (
                e.name,
                e.family,
                *(f"{n:,}" for n in (e.num_layers, e.hidden_size, e.num_heads, e.max_positions, e.vocab_size)),
                f"{e.num_parameters / 1e6:,.1f} M",
            )
            for e in entries
            if e.use == use
        ]
    spare = ("vocabulary", "heads", "positions", "hidden")
    print_aligned(("model", "family", *numbers), rows, right=numbers, spare=spare, above=above)
    out = console()
    out.print(f"\n{len(entries)} models, known without a network. Any folder or hub id works too.", style="dim")


def _make_card(name: str, task: str, trust_remote_code: bool) -> "ModelCard":
    checked_choice("task", task)
    with working(f"Building {name} without weights"):
        from vramfit.models.anatomy import model_card
        from vramfit.models.resolve import resolve

        resolved = resolve(name, task=task, trust_remote_code=trust_remote_code)
        card = model_card(resolved)
        return replace(card, weight_bytes={**card.weight_bytes, **_int8_bytes(resolved)})


def _int8_bytes(resolved: "ResolvedModel") -> dict[str, int]:
    """What the parameters take with int8 layers, as a prediction lays them out; nothing without torchao."""
    from vramfit.models.build import build_meta
    from vramfit.techniques.quantization import quantized_model_bytes

    try:
        return {"int8": quantized_model_bytes(build_meta(resolved), "int8")}
    except MissingExtra:
        return {}


def _print_card(card: "ModelCard") -> None:
    out = console()
    out.print(f"[bold]{escape(card.name)}[/bold]  ({card.model_class}, from {card.origin})", soft_wrap=True)
    shared = f" ({card.num_layer_modules} with weights of its own)"
    for label, value in (
        ("layers", f"{card.num_layers}" + (shared if card.num_layer_modules != card.num_layers else "")),
        ("hidden size", _count(card.hidden_size)),
        ("feed-forward", f"{_count(card.intermediate_size)}  {card.activation or ''}".rstrip()),
        ("heads", f"{_count(card.num_heads)} × {_count(card.head_size)}"),
        ("positions", _count(card.max_positions)),
        ("vocabulary", _count(card.vocab_size)),
        ("saved with", f"transformers {card.saved_with or 'unknown'}; installed {card.installed}"),
        ("tasks", ", ".join(card.tasks) or "–"),
        ("attention", ", ".join(card.attention)),
    ):
        lines = textwrap.wrap(value, max(20, out.width - LABEL_WIDTH), break_on_hyphens=False) or ["–"]
        for beginning, line in zip([label, *[""] * len(lines)], lines, strict=False):
            out.print(f"{beginning:<{LABEL_WIDTH}}{line}", markup=False, soft_wrap=True)
    counts = {**card.parts, "all": card.num_parameters}
    rows = [(path, f"{count:,}", format_bytes(4 * count)) for path, count in counts.items()]
    out.print()
    print_aligned(("part", "parameters", "fp32"), rows, right=("parameters", "fp32"))
    sizes = "   ".join(f"{name} {format_bytes(size)}" for name, size in card.weight_bytes.items())
    out.print(f"\nWeights in each precision (int8: layers of the encoder only)\n{sizes}", soft_wrap=True)


def _count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"
