"""What peers do on a GPU beside what vramfit does: finding a batch, training, loading, gradients; for `peers.py`.

Nothing is run here: the tables are made from the results of `packed_speed.py`, `trainer_runs.py` and `loading.py`, and
from the table that `scripts/trainer_gradients.py` has written.
"""

from pathlib import Path
from typing import Any

from pages import bullets, paragraph, table
from readme_runs import CAP, GIB, SHOWN, lines, newest, num_steps, packed_lines

GRADIENTS = Path(__file__).parent.parent / "docs" / "trainer.md"
SIDES = {
    "recorded": "vramfit, CUDA graphs",
    "planned": "vramfit, no graphs",
    "trainer": "Trainer, `auto_find_batch_size`",
    "accelerate": "Accelerate, `find_executable_batch_size`",
    "lightning": "Lightning, `scale_batch_size`",
}
LOADERS = {"vramfit": "`vramfit.load`", "from_pretrained": "`from_pretrained`", "device_map": "with `device_map`"}


def sections() -> list[str]:
    """The part of the page that comes of runs."""
    return [
        "## Finding a batch, and training with it",
        *_training(),
        "## One line in a Trainer script",
        *_scripts(),
        "## Loading",
        *_loading(),
        "## Gradients under accumulation",
        *_gradients(),
    ]


def _training() -> list[str]:
    found = packed_lines()
    rows: list[list[object]] = []
    for lengths, about in (("real", "reviews"), ("full", "all 512")):
        for model, shown in SHOWN.items():
            sides = {n["side"]: n for n in found if (n["model"], n["cap"], n["lengths"]) == (model, CAP, lengths)}
            best = max(sides[side]["tokens_per_s"] for side in sides if SIDES.get(side, "").startswith("vramfit"))
            for side, told in SIDES.items():
                if side in sides:
                    line = sides[side]
                    ahead = "" if told.startswith("vramfit") else f" ({best / line['tokens_per_s']:.1f}×)"
                    rows.append([f"{shown}, {about}", told, *_how(line), f"{line['tokens_per_s']:,.0f}{ahead}"])
    return [
        paragraph(
            "11.17 GiB of an H200, bf16 autocast, fused AdamW, 64 samples a step (`benchmarks/packed_speed.py`). The",
            "other tools try a batch, run out of memory, and try a smaller one; vramfit predicts, and then needs some",
            "seconds to compile kernels.",
        ),
        bullets(
            "*Micro-batch* is the samples of a pass. For vramfit, which packs, it stands for that many times 512 "
            "tokens; its layers are fused.",
            "*Seconds before the first step* is the search for a batch, or vramfit's compilation and rehearsal.",
            "*Ran out* counts how often memory ran out.",
            "Where a tool ran more than once, the table has its fastest run. A run of 24 steps includes the loading of "
            "kernels: compare runs of similar length.",
        ),
        table(
            [
                "",
                "tool",
                "steps",
                "micro-batch",
                "seconds before the first step",
                "ran out",
                "peak GiB",
                "real tokens/s",
            ],
            rows,
        ),
    ]


def _how(line: dict[str, Any]) -> list[object]:
    seconds = line.get("search_s", line.get("rehearsal_s", 0.0))
    return [
        num_steps(line),
        line["micro_batch"],
        f"{seconds:.1f}",
        line["num_ooms"],
        f"{line['max_reserved_bytes'] / GIB:.2f}",
    ]


def _scripts() -> list[str]:
    found = lines("trainer_runs_h200", "task", "cap", "side")
    runs = {(n["task"], n["cap"], n["side"]): n for n in found}
    rows: list[list[object]] = []
    behind: list[str] = []
    for task, cap in sorted({(n["task"], n["cap"]) for n in found if n["side"] == "fitted"}):
        if (task, cap, "auto") not in runs:
            continue
        fitted, auto = runs[task, cap, "fitted"], runs[task, cap, "auto"]
        if fitted["tokens_per_s"] < auto["tokens_per_s"]:
            behind.append(f"{task} in {cap / GIB:g} GiB")
        rows.append(
            [
                task,
                f"{cap / GIB:g} GiB",
                *(n for run in (fitted, auto) for n in (run["batch"], f"{run['tokens_per_s']:,.0f}", run["num_ooms"])),
                f"{fitted['tokens_per_s'] / auto['tokens_per_s']:.2f}×",
            ]
        )
    head = ["", "cap"]
    head += [f"{side}, {what}" for side in ("fitted", "auto") for what in ("step", "tokens/s", "ran out")]
    return [
        paragraph(
            "A Trainer script fine-tunes BERT-base with 64 samples a step, once with `fit_trainer` (*fitted*) and",
            "once with `auto_find_batch_size` (*auto*), which also shrinks the step (`benchmarks/trainer_runs.py`).",
            "*Step* is the samples of an optimizer step, *ran out* how often memory ran out.",
        ),
        table([*head, "gain"], rows),
        *([f"{_listed(behind)}: the fitted script is not ahead there."] if behind else []),
    ]


def _loading() -> list[str]:
    result = newest("loading_h200")
    rows = [
        [
            f"{row['kind']}",
            LOADERS[row["loader"]],
            f"{row['seconds']:.2f}",
            f"{row['peak_device_bytes'] / GIB:.2f}",
            f"{row['final_device_bytes'] / GIB:.2f}",
        ]
        for row in result["rows"]
        if row["loader"] in LOADERS
    ]
    times = {(row["kind"], row["loader"]): row["seconds"] for row in result["rows"] if row["loader"] in LOADERS}
    quickest = {kind: min(s for (k, _), s in times.items() if k == kind) for kind, _ in times}
    behind = [kind for kind, seconds in quickest.items() if seconds < times[kind, "vramfit"]]
    return [
        paragraph(
            "BERT-large from a warm page cache to an H200, each tool in its own process (`benchmarks/loading.py`,",
            f"{result['date']}).",
        ),
        table(["weights in", "tool", "seconds", "peak GiB", "final GiB"], rows),
        *([f"vramfit is not the fastest with {_listed(behind)}."] if behind else []),
    ]


def _gradients() -> list[str]:
    rows = [line.split("|")[1:-1] for line in GRADIENTS.read_text(encoding="utf-8").splitlines() if " × |" in line]
    eight = [float(row[4].strip().removesuffix("×")) for row in rows]
    wrong = sum(abs(ratio - 1) > 0.01 for ratio in eight)
    worst = max((row[6].strip() for row in rows), key=lambda text: float(text.removeprefix("< ")))
    return [
        paragraph(
            f"For {len(rows)} pairs of a head and a model family, the plain Trainer's gradient over 8 passes was",
            f"compared with that of the whole batch. It is wrong in {wrong} of them: {min(eight):.2f} to",
            f"{max(eight):.2f} times as long. With `fit_trainer` the difference is below {worst.removeprefix('< ')}",
            "in all of them ([the table](trainer.md#what-is-wrong-without-it), by `scripts/trainer_gradients.py`).",
        )
    ]


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
