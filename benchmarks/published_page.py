"""docs/cards.md, made of published measurements, predictions and explanations."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pages import bullets, page, paragraph, table

from vramfit.devices.catalogue import find_gpu

PAGE = Path(__file__).parent.parent / "docs" / "cards.md"
EXPLANATIONS = Path(__file__).parent / "published" / "explanations.json"
OLDEST_PROMISED = 2
"""The major release of PyTorch from which predictions are promised, as `vramfit.estimator.resolve` has it."""
INTRO = (
    "vramfit's rules were made on one NVIDIA H200. This page compares its predictions with figures that others",
    "published for other cards. A figure was taken only if its source names model, batch, length, precision, card",
    "and versions. Settings and predictions were committed before they were compared with the figures, and no row",
    "was dropped afterwards. Where a source turned out to omit a setting that decides the figure, its rows are shown",
    "apart.",
)
HOW = (
    "*Below*: the prediction is lower than the measurement by more than the rounding of the published figure; for a "
    "largest batch, it names a batch that failed.",
    "Errors are relative to the measurement; for a largest batch, to the prediction.",
    "*Growth*: some sources publish what NVML reports, which includes the CUDA context and memory of the driver. These "
    "rows compare the growth over the smallest run, and give the error as a share of the whole figure.",
)


@dataclass(frozen=True)
class Compared:
    """One row and its prediction."""

    row: dict[str, Any]
    predicted: int

    @property
    def is_edge(self) -> bool:
        return bool(self.row["figure"] == "largest_batch")

    @property
    def is_promised(self) -> bool:
        return int(self.row["torch"].partition(".")[0]) >= OLDEST_PROMISED

    @property
    def is_repeatable(self) -> bool:
        """Whether the source says all that decides the figure."""
        return "left_out" not in self.row

    @property
    def error(self) -> float:
        """Positive where more memory was predicted than measured; of a largest batch, where fewer samples were."""
        measured = self.row["measured"]
        if self.is_edge:
            return float(measured / self.predicted - 1) if self.is_below else max(0.0, measured / self.predicted - 1)
        whole = measured + self.row.get("base_measured", 0)
        return float((self.predicted - measured) / whole)

    @property
    def is_below(self) -> bool:
        """Whether less memory was predicted than measured, beyond the rounding of what was published."""
        if self.is_edge:
            return bool(self.predicted >= self.row["failed"])
        return bool(self.predicted < self.row["measured"] - self.row["resolution"])


def compare(measurements: dict[str, Any], predictions: dict[str, Any]) -> list[Compared]:
    """Every row with its prediction."""
    return [Compared(row, predictions[row["id"]]["predicted"]) for row in measurements["rows"]]


def write_page(measurements: dict[str, Any], predictions: dict[str, Any]) -> None:
    """Write docs/cards.md."""
    PAGE.write_text(make_page(measurements, predictions), encoding="utf-8")


def make_page(measurements: dict[str, Any], predictions: dict[str, Any]) -> str:
    """The text of docs/cards.md."""
    found = compare(measurements, predictions)
    promised = [c for c in found if c.is_promised and c.is_repeatable]
    unclear = [c for c in found if not c.is_repeatable]
    outside = [c for c in found if not c.is_promised]
    num_below = sum(c.is_below for c in promised)
    return page(
        "# Other cards",
        paragraph(*INTRO),
        paragraph(
            f"{len(promised)} figures on {len({c.row['card'] for c in promised})} cards with PyTorch 2.0 to 2.11:",
            f"{len(promised) - num_below} predictions are at or above the measurement, {num_below} below, the worst by",
            f"{_percent(-min(c.error for c in promised))}. A job whose prediction is below the measurement may run out",
            "of memory although it was predicted to fit, so every such row is listed, with the reason if it is known.",
        ),
        "## By card",
        by_card(promised),
        bullets(*HOW),
        "## Predictions below the measurement, and why",
        *explained([c for c in promised if c.is_below], predictions),
        "## Rows whose source omits a setting",
        *explained(unclear, predictions),
        *sources(measurements["sources"], unclear),
        "## PyTorch 1.x: outside what is promised",
        paragraph(
            "vramfit predicts for PyTorch 2.0 and newer. Asked for an older release, or for a card that only older",
            "releases support (K80), it says “outside what is promised”, and a plan leaves a quarter of the memory",
            "free. These rows show why.",
        ),
        *explained(outside, predictions),
        *sources(measurements["sources"], outside),
        "## All rows",
        *sources(measurements["sources"], promised),
        "## What a CUDA context takes",
        contexts(),
        paragraph(
            "For every other card an upper bound is used: 550 MiB, or the figure of a card of the same architecture if",
            "that is larger. CUDA itself reported less on three machines with a T4: 135 MiB after the first matrix",
            "products and convolutions. `vramfit estimate` says which kind of figure it used.",
        ),
        "## Your card",
        paragraph(
            "`vramfit measure bert-base-uncased --batch 8 --seq 128 --receipt my-card.json` runs a job on your GPU and",
            "writes what was predicted and what was measured, with nothing private in it. A pull request that adds the",
            "file to `receipts/` is checked by CI: see [receipts](receipts.md).",
        ),
        "Made by `benchmarks/published_cards.py` from `benchmarks/published`.",
    )


def by_card(found: list[Compared]) -> str:
    """A row a card: how many, how often below, and by how much."""
    cards = sorted({c.row["card"] for c in found}, key=lambda card: find_gpu(card).title)
    rows = []
    for card in cards:
        of_card = [c for c in found if c.row["card"] == card]
        below = [-c.error for c in of_card if c.is_below]
        torches = sorted(
            {".".join(c.row["torch"].split(".")[:2]) for c in of_card}, key=lambda v: [int(n) for n in v.split(".")]
        )
        rows.append(
            [
                find_gpu(card).title,
                ", ".join(torches),
                len(of_card),
                len(below),
                _percent(median(below)) if below else None,
                _percent(max(below)) if below else None,
                _percent(max(0.0, *(c.error for c in of_card))),
            ]
        )
    return table(["card", "torch", "figures", "below", "below by, median", "below by, most", "above by, most"], rows)


def explained(below: list[Compared], predictions: dict[str, Any]) -> list[str]:
    """A paragraph for each reason, with the rows it is for."""
    parts, left = [], list(below)
    for entry in json.loads(EXPLANATIONS.read_text(encoding="utf-8")):
        here = [c for c in left if c.row["id"].startswith(entry["rows"])]
        left = [c for c in left if c not in here]
        if not here:
            continue
        again = {c.row["id"]: predictions.get(f"{c.row['id']} again", {}).get("predicted") for c in here}
        why = entry["why"].replace("{again}", ", ".join(f"{n:,}" for n in again.values() if n is not None))
        sizes = f"{_percent(min(-c.error for c in here))} to {_percent(max(-c.error for c in here))}"
        size = sizes if len(here) > 1 else _percent(-here[0].error)
        mark = "" if entry["is_explained"] else " **Not fully explained.**"
        rows = "1 row" if len(here) == 1 else f"{len(here)} rows"
        parts.append(paragraph(f"**{_names(here)}** ({rows}, below by {size}).{mark} {why}"))
    assert not left, f"no explanation for {[c.row['id'] for c in left]}"
    return parts


def _names(found: list[Compared]) -> str:
    models = dict.fromkeys(c.row["workload"]["model"] for c in found)
    return f"{find_gpu(found[0].row['card']).title}, {', '.join(models)}"


def sources(known: dict[str, Any], found: list[Compared]) -> list[str]:
    """For each source: what it says of itself, and its rows."""
    parts = []
    for name, source in known.items():
        of_source = [c for c in found if c.row["source"] == name]
        if of_source:
            parts += [
                f"### {source['card'].split(',')[0]}: [{name}]({source['address']})",
                paragraph(f"{source['versions']}. {source['settings']}. {source['memory']}. Source: {source['read']}."),
                rows_table(of_source),
            ]
    return parts


def rows_table(found: Iterable[Compared]) -> str:
    """One line a row."""
    return table(["workload", "figure", "measured", "predicted", "error"], [_line(c) for c in found])


def _line(c: Compared) -> list[object]:
    w = c.row["workload"]
    size = f"{w['batch']} × {w['seq']}" if "batch" in w else f"{w['seq']} tokens"
    words = [w["model"], size, w["mode"], w["precision"], w.get("attention", "")]
    if c.is_edge:
        measured = f"{c.row['measured']:,} ran, {c.row['failed']:,} failed"
        samples = c.predicted - c.row["measured"]
        error = "as measured" if 0 <= samples < c.row["resolution"] else f"{samples:+,} samples"
        return [" ".join(filter(None, words)), "largest batch", measured, f"{c.predicted:,}", error]
    figures = {"growth": "reserved, growth"}
    return [
        " ".join(filter(None, words)),
        figures.get(c.row["figure"], c.row["figure"]),
        f"{c.row['measured'] / 1e6:,.1f} MB",
        f"{c.predicted / 1e6:,.1f} MB",
        f"{100 * c.error:+.2f} %",
    ]


def contexts() -> str:
    """The cards whose context is known."""
    from vramfit.devices.catalogue import all_gpus

    known = [gpu for gpu in all_gpus() if gpu.context_bytes is not None]
    rows = [
        [gpu.title, f"{(gpu.context_bytes or 0) // 2**20} MiB", gpu.context_basis, gpu.source_of("context_bytes")]
        for gpu in known
    ]
    return table(["card", "context", "basis", "source"], rows)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
