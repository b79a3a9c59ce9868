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
        f"Measured in Chromium on {WORDS[r['cores']]} cores that were busy with other work (load average",
        f"{r['load_average']:.0f}; `benchmarks/web_latency.py`, {', '.join(TITLES[model] for model in models)}): the",
        f"first figure of a model came after {min(first):.1f} to {max(first):.1f} s. At the pace of a hand, a move",
        f"every half second, all {num_moves} moves of the batch were answered within",
        f"{max(times['longest'] for times in paused)} ms and {soon} of {num_moves} moves of the length {SOON}, once",
        f"the server had had {web_latency.PAUSE_S:.0f} s to prepare the lengths. Moves that follow each other without",
        f"any pause are computed one by one: {min(medians)} to {max(medians)} ms at the median there. A length whose",
        "trace is not ready yet takes as long as the first figure.",
    )


def asked() -> str:
    """The page's API under load and beside its schema."""
    fuzz, load = newest("web_fuzz"), newest("web_load")
    assert not any(name.split()[-1].startswith("5") for name in fuzz["statuses"])
    assert load["statuses"] == {"200": load["requests"]}
    more = (load["resident_most_bytes"] - load["resident_before_bytes"]) / MIB
    return paragraph(
        f"`scripts/fuzz_api.py` asks what the schema allows and much that it does not: {fuzz['requests']:,} requests",
        "gave no server's error and no answer beside the schema. `benchmarks/web_load.py` asks with",
        f"{load['clients']} clients at once: {load['requests']} answers in {load['seconds']:.0f} s, the last of them",
        f"to those who waited when the time was over, all of them 200, with {more:.0f} MiB more held at the most; on",
        f"{WORDS[load['cores']]} busy cores the median client waited {load['median_s']:.0f} s for its turn.",
    )


def ranks() -> str:
    """One rank of several, predicted and measured."""
    summary = newest("ranks_memory_h200")["summary"]
    found, ddp = summary["all"], summary["ddp"]
    assert (found["num_below"], found["num_reserved_beyond_safe"]) == (0, 0)
    assert ddp["num_exact"] == ddp["num_cases"]
    return paragraph(
        "`benchmarks/ranks_memory.py` measures one rank on a real GPU, with PyTorch's `fake` process group in place of",
        f"the others. On an H200, {found['num_cases']} cases with 2, 4 and 8 ranks: allocated peaks are predicted",
        f"exactly in {found['num_exact']} of them (all {ddp['num_cases']} with DDP), {found['worst_error']:.2%}",
        "too high at most and never too low; none reserved more than the bound that `fits` is decided on. The driver",
        "lays weights out differently in every run, so that two runs of the same FSDP2 case differ by up to",
        f"{_spread():.2%}: the prediction is the highest of twelve layouts.",
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
