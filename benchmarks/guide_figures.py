"""Figures of the guides in docs, each paragraph made from committed results between two marks, as in the README.

python benchmarks/guide_figures.py
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import readme_figures
import web_latency
from pages import paragraph
from readme_figures import ROOT, WORDS
from readme_runs import newest

MIB = 2**20
TRUTH = ROOT / "tests" / "truth" / "ranks_h200.json"
SOON = "within 150 ms"
TITLES = {
    "bert-base-uncased": "BERT-base",
    "bert-large-uncased": "BERT-large",
    "deberta-v3-base": "DeBERTa-v3-base",
    "modernbert-base": "ModernBERT-base",
}


def write() -> None:
    """Write the guides anew."""
    for page, blocks in GUIDES.items():
        page.write_text(readme_figures.fill(page.read_text(encoding="utf-8"), blocks), encoding="utf-8")


def waited() -> str:
    """From slider to figure on the page."""
    r = newest("web_latency")
    models = r["milliseconds"]
    first = [times["first"] / 1000 for times in models.values()]
    paused, prepared, pressed = (
        [times[pace] for times in models.values()]
        for pace in (
            "batch, at the pace of a hand",
            "length, prepared, at the pace of a hand",
            "batch, one move after another",
        )
    )
    num_moves = web_latency.NUM_MOVES * len(models)
    assert all(times[SOON] == 1 for times in paused)
    soon = sum(round(times[SOON] * web_latency.NUM_MOVES) for times in prepared)
    medians = [round(times["median"], -1) for times in pressed]
    return paragraph(
        f"Measured in Chromium on {WORDS[r['cores']]} busy cores (load average {r['load_average']:.0f};",
        f"`benchmarks/web_latency.py`, {', '.join(TITLES[model] for model in models)}): the first figure of a model",
        f"appeared after {min(first):.1f} to {max(first):.1f} s. With a move of a slider every half second, all",
        f"{num_moves} moves of the batch were answered within {max(times['longest'] for times in paused)} ms, and",
        f"{soon} of {num_moves} moves of the length {SOON}, after the server had had {web_latency.PAUSE_S:.0f} s to",
        f"prepare the lengths. Moves without a pause are computed one after another, at a median of {min(medians)} to",
        f"{max(medians)} ms. A length whose trace is not ready yet takes as long as the first figure.",
    )


def asked() -> str:
    """The page's API under load, and asked what its schema does not allow."""
    fuzz, load = newest("web_fuzz"), newest("web_load")
    assert not any(name.split()[-1].startswith("5") for name in fuzz["statuses"])
    assert load["statuses"] == {"200": load["requests"]}
    more = (load["resident_most_bytes"] - load["resident_before_bytes"]) / MIB
    return paragraph(
        f"`scripts/fuzz_api.py` sent {fuzz['requests']:,} requests, valid and invalid: none got a server error (5xx),",
        f"and every answer matched the schema. `benchmarks/web_load.py` ran {load['clients']} clients for",
        f"{load['seconds']:.0f} s: they got {load['requests']} answers, all with status 200, and memory grew by",
        f"{more:.0f} MiB at most. On {WORDS[load['cores']]} busy cores the median client waited",
        f"{load['median_s']:.0f} s.",
    )


def ranks() -> str:
    """One rank of several, predicted and measured."""
    summary = newest("ranks_memory_h200")["summary"]
    found, ddp = summary["all"], summary["ddp"]
    assert (found["num_below"], found["num_reserved_beyond_safe"]) == (0, 0)
    assert ddp["num_exact"] == ddp["num_cases"]
    return paragraph(
        "`benchmarks/ranks_memory.py` measures one rank on a real GPU, with PyTorch's `fake` process group in place",
        f"of the others. On an H200, {found['num_cases']} cases with 2, 4 and 8 ranks: allocated peaks are predicted",
        f"exactly in {found['num_exact']} of them (all {ddp['num_cases']} with DDP), at most",
        f"{found['worst_error']:.2%} too high in the others, and never too low. No case reserved more than the bound",
        "on which `fits` is decided. The driver places weights differently in every run, so two runs of the same",
        f"FSDP2 case differ by up to {_spread():.2%}; the prediction is the highest of twelve placements.",
    ).replace("%", " %")


def _spread() -> float:
    """By how much two runs of the same case differ at most."""
    cases: list[dict[str, Any]] = json.loads(TRUTH.read_text(encoding="utf-8"))
    peaks = [[max(allocated for _, allocated, _ in run.values()) for run in case["runs"]] for case in cases]
    return max(max(runs) / min(runs) - 1 for runs in peaks)


GUIDES: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    ROOT / "docs" / "seeing.md": {"waited": waited, "asked": asked},
    ROOT / "docs" / "several-gpus.md": {"ranks": ranks},
}

if __name__ == "__main__":
    write()
