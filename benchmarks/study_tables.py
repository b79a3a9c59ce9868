"""`docs/study.md` and its picture, from the predictions and the results, if any, of `bert_memory_study.py`."""

import json
from pathlib import Path
from typing import Any

import forked
import pages
import study_picture
from pages import paragraph, table
from study_cases import LENGTHS, PLANNED_BATCH, Case, cases
from study_predictions import PREDICTIONS

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "study.md"
PICTURE = ROOT / "docs" / "images" / "study-growth.svg"
MIB, GIB = 2**20, 2**30
STUDY = (
    "https://github.com/krishansubudhi/krishansubudhi.github.io/blob/1dada6e7e4d4f0d3c744960871580471002346da/_posts/"
    "2019-09-20-BertMemoryAnalysis.md"
)
HEAD = ("gpu", "date", "torch", "transformers")
Known = dict[str, tuple[dict[str, Any], dict[str, Any]]]
"""Case → predicted and measured; the latter empty where it was not run."""


def write() -> int:
    """Write the page and the picture."""
    known, head = read()
    PAGE.write_text(page(known, head), encoding="utf-8")
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(study_picture.draw(bars(known)), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))
    return 0


def read() -> tuple[Known, dict[str, Any]]:
    """Every case's figures, and where they were measured; the head is empty without results."""
    predicted = json.loads(PREDICTIONS.read_text(encoding="utf-8"))["cases"]
    files = sorted(RESULTS.glob("bert_memory_study_*.jsonl"))
    lines = forked.read_lines(files[-1], "name") if files else []
    measured = {line["name"]: line["measured"] for line in lines if "measured" in line}
    head = {key: " and ".join(sorted({n[key] for n in lines})) for key in HEAD} if lines else {}
    return {name: (figures, measured.get(name, {})) for name, figures in predicted.items()}, head


def page(known: Known, head: dict[str, Any]) -> str:
    """The page as Markdown."""
    return pages.page(
        "# How much memory does BERT take? A study run again",
        *_introduction(head),
        "## Where the memory of 512 tokens goes",
        *_question(known),
        "## A forward pass",
        *_forward(known),
        "## The largest batch in 11.17 GiB",
        *_largest(known),
        "## What a plan achieves in the same memory",
        *_reached(known),
    )


def _introduction(head: dict[str, Any]) -> list[str]:
    return [
        paragraph(
            f"[A study of September 2019]({STUDY}) (PyTorch 1.2, `pytorch_transformers`) measured BERT on a card with",
            "11.17 GiB: the memory of a forward pass at 128, 256 and 512 tokens, with and without gradients, and",
            "which batches run. This page repeats its tables on a GPU whose allocator may reserve 11.17 GiB, next to",
            "vramfit's predictions, which were made without that GPU. The column *2019* has the study's figures.",
            "With gradients they are higher, since its BERT code kept more per pass; its 11.17 GiB also held the",
            "CUDA context.",
        ),
        f"Measured on an {head['gpu']}, torch {head['torch']}, transformers {head['transformers']}, {head['date']}."
        if head
        else "The measurements have not been made yet; columns that need them show –.",
        paragraph(
            "Made by `benchmarks/bert_memory_study.py`. Predictions were committed before anything was measured,",
            "except for the largest batches: they had been predicted for many passes in a row, and were predicted",
            "again for a single pass after a first search on the GPU.",
        ),
    ]


def _question(known: Known) -> list[str]:
    low, high = (known[_name(seq=seq)][0]["parts"] for seq in (256, 512))
    square = [sum(size for part, size in parts.items() if part.startswith("square")) for parts in (low, high)]
    share = (square[1] - square[0]) / (_kept(high) - _kept(low))
    return [
        paragraph(
            "The study left a question open: from 256 to 512 tokens the memory of a pass more than doubles. Why?",
        ),
        "![What a forward pass of one sample keeps, by length, eager and SDPA](images/study-growth.svg)",
        paragraph(
            "Because of the attention scores. From 256 to 512 tokens, what is kept for each token doubles, from",
            f"{_mib(low['tokens'])} to {_mib(high['tokens'])} MiB in all. What is kept for each *pair* of tokens, in",
            f"12 heads of 12 layers, grows fourfold, from {_mib(square[0])} to {_mib(square[1])} MiB: {share:.0%} of",
            "the increase. With dropout the share is larger still, since the probabilities are kept twice, with a",
            "mask. Fused attention (`sdpa`, the right half of the picture) keeps none of these.",
        ),
    ]


def _forward(known: Known) -> list[str]:
    rows = []
    for case in cases():
        if case.kind == "forward":
            predicted, measured = known[case.name]
            figures = ("after_allocated_bytes", "peak_allocated_bytes")
            cells = [_mib(found.get(figure)) for figure in figures for found in (predicted, measured)]
            rows.append([_title(case), _plain(case.original), *cells, _off(predicted, measured)])
    return [
        paragraph(
            "In MiB: allocated memory after a pass whose outputs are still held, as the study measured it, and the",
            "peak during the pass. `eval` is with gradients and without dropout, as in the study; `train` is with",
            "both; `no-grad` is with neither. *Difference* is the larger one of the two predictions.",
        ),
        table(["case", "2019", "predicted", "measured", "peak predicted", "peak measured", "difference"], rows),
        paragraph(
            "Neither `eval()` nor `x.requires_grad = False` frees activations: token ids have no gradient anyway, and",
            "autograd keeps activations because the weights need gradients. `torch.no_grad()` frees them.",
        ),
    ]


def _off(predicted: dict[str, Any], measured: dict[str, Any]) -> str:
    if not measured:
        return "–"
    differences = [predicted[k] - measured[k] for k in ("after_allocated_bytes", "peak_allocated_bytes")]
    return f"{max(differences, key=abs):+,} B" if any(differences) else "0 B"


def _largest(known: Known) -> list[str]:
    chosen = [case for case in cases() if case.kind == "largest"]
    rows = []
    for case in chosen:
        predicted, measured = known[case.name]
        figures = (predicted["batch"], measured.get("batch"), predicted["batch_of_many_passes"])
        rows.append([_title(case), *map(_plain, (case.original, *figures))])
    return [
        paragraph(
            "Fp32, eager attention. *Predicted* and *measured* are for a single forward pass. The study tried powers",
            "of two only; here every size was tried. `vramfit max-batch` answers for *pass after pass*, where the",
            "largest batch can be smaller, because segments that the first pass leaves cached may not fit the second",
            "one.",
        ),
        table(["case", "2019", "predicted", "measured", "pass after pass"], rows),
        *([] if any(known[case.name][1] for case in chosen) else ["These have not been searched for on a GPU yet."]),
    ]


def _reached(known: Known) -> list[str]:
    return [
        paragraph(
            "The study's batches were for forward passes alone; these train, with forward, backward, clipping and",
            f"AdamW. *Planned step* is a plan for {PLANNED_BATCH} samples a step: passes × number of passes, and",
            "settings. *One pass* is the largest batch that trains without being split (bf16 autocast,",
            "checkpointing, fused AdamW), *inference* the largest in bf16 without gradients. Both are predicted;",
            "*ran* says whether that batch ran. *Retries* are allocator retries in the run.",
        ),
        table(
            ["case", "planned step", "samples/s predicted", "measured", "one pass", "ran", "inference", "ran"],
            [_reached_row(case, known) for case in cases() if case.kind == "training"],
        ),
    ]


def _reached_row(case: Case, known: Known) -> list[str]:
    predicted, measured = known[case.name]
    w = predicted["workload"]
    kept = "" if w["checkpointing"] is None else f", checkpointing {w['checkpointing']}"
    setting = f"{w['micro_batch']} × {w['accumulate']}, {w['precision']}{kept}, {w['optimizer']}"
    cells = [setting, f"{PLANNED_BATCH / predicted['step_s']:,.0f}", _rate(measured)]
    for kind, state in (("one-pass", "train"), ("inference", "no-grad")):
        name = Case(kind=kind, model=case.model, head=case.head, seq=case.seq, state=state, attention="sdpa").name
        p, m = known[name]
        cells += [_plain(p["batch"]), {True: "yes", False: "no"}.get(m.get("ran"), "–")]
    return [f"{case.model}, {case.head}, {case.seq}", *cells]


def _rate(measured: dict[str, Any]) -> str:
    if not measured:
        return "–"
    if not measured.get("samples_per_s"):
        return "failed"
    retries = measured["num_alloc_retries"]
    told = " (out of memory on the way)" if measured["num_ooms"] else f" ({retries} retries)" if retries else ""
    return f"{measured['samples_per_s']:,.0f}{told}"


def bars(known: Known) -> list[study_picture.Bar]:
    """The bars of the picture."""
    return [
        study_picture.Bar(
            group=attention,
            label=str(seq),
            parts=known[_name(seq=seq, attention=attention)][0]["parts"],
            measured_bytes=known[_name(seq=seq, attention=attention)][1].get("peak_allocated_bytes"),
            original_bytes=(original * MIB if (original := _case(seq=seq, attention=attention).original) else None),
        )
        for attention in ("eager", "sdpa")
        for seq in LENGTHS
    ]


def _case(*, seq: int, attention: str = "eager") -> Case:
    return Case(kind="forward", model="base", head="classification", seq=seq, attention=attention)


def _name(*, seq: int, attention: str = "eager") -> str:
    return _case(seq=seq, attention=attention).name


def _kept(parts: dict[str, int]) -> int:
    return sum(parts.values()) - parts["fixed"]


def _plain(count: int | None) -> str:
    return "–" if count is None else f"{count:,}"


def _mib(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / MIB:,.0f}"


def _title(case: Case) -> str:
    many = f" × {case.batch}" if case.kind == "forward" else ""
    note = ", `x.requires_grad = False`" if case.frozen_input else ""
    attention = f", {case.attention}" if case.attention != "eager" else ""
    return f"{case.model}, {case.head}, {case.seq}{many}, {case.state}{attention}{note}"
