"""`vramfit models`: the models known offline, or one configuration the way a person checks it."""

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from vramfit.cli.progress import working
from vramfit.cli.terminal import Json, console, print_aligned, print_json
from vramfit.errors import MissingExtra, WorkloadError, nearest_names
from vramfit.tasks import encoder_alone
from vramfit.units import format_bytes
from vramfit.workload import CHOICES

if TYPE_CHECKING:
    from vramfit.models.card import ModelCard
    from vramfit.models.resolve import ResolvedModel

EXAMPLE = "vramfit models bert-base-uncased"
LABEL_WIDTH = 16


def run(
    name: Annotated[
        str | None, typer.Argument(help="A catalogue name, a folder with config.json, or a hub id.")
    ] = None,
    task: Annotated[str, typer.Option(help="The head to count with it.")] = encoder_alone().name,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Let the model's repository run its own Python code here."),
    ] = False,
    json: Json = False,
) -> None:
    """List the model catalogue, or show one: layers, sizes, parameters by part, bytes in each precision."""
    if name is None:
        _list(json)
    else:
        _show(name, task, trust_remote_code, json)


def _list(json: bool) -> None:
    from vramfit.models.catalogue import all_entries

    entries = all_entries()
    if json:
        print_json(entries)
        return
    numbers = ("layers", "hidden", "heads", "positions", "vocabulary", "parameters")
    rows = [
        (
            e.name,
            e.family,
            *(f"{n:,}" for n in (e.num_layers, e.hidden_size, e.num_heads, e.max_positions, e.vocab_size)),
            f"{e.num_parameters / 1e6:,.1f} M",
        )
        for e in entries
    ]
    print_aligned(("model", "family", *numbers), rows, right=numbers, spare=("vocabulary", "heads", "positions"))
    out = console()
    out.print(f"\n{len(entries)} models, known without a network. Any folder or hub id works too.", style="dim")


def _show(name: str, task: str, trust_remote_code: bool, json: bool) -> None:
    if task not in CHOICES["task"]:
        near = nearest_names(task, CHOICES["task"], 1)[0]
        raise WorkloadError([f"task {task!r} is not one of {', '.join(CHOICES['task'])} (nearest: {near})"])
    with working(f"Building {name} without weights"):
        from vramfit.models.card import model_card
        from vramfit.models.resolve import resolve

        resolved = resolve(name, task=task, trust_remote_code=trust_remote_code)
        card = model_card(resolved)
        card = replace(card, weight_bytes={**card.weight_bytes, **_int8_bytes(resolved)})
    if json:
        print_json([card])
    else:
        _print_card(card)


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
