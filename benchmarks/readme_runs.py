"""Blocks of the README about runs on a GPU: without padding, with host memory, served, watched."""

import json
from pathlib import Path
from statistics import mean, median
from typing import Any

import forked
from pages import paragraph, table

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
COUNTED = 20_000_000
"""Tokens of a run that its start is counted over: 25,000 reviews, three times, are 21 million."""
CAP = int(11.17 * GIB)
SHOWN = {"bert-base-uncased": "BERT-base", "bert-large-uncased": "BERT-large"}
PEERS = {"trainer": "the Trainer", "accelerate": "Accelerate's loop", "lightning": "Lightning"}
OURS = ("planned", "recorded")
"""What plans make of it, without and with passes that are recorded; the faster is shown."""
MOST_STEPS, ENOUGH_S = 240, 12.0
"""When a run of `packed_speed.py` ends."""
FEW_STEPS = 24
"""Of runs whose lines do not say how many they had."""
SMALLEST = "smallest "


def newest(question: str) -> Any:
    """The newest results that answer a question."""
    return json.loads(sorted(RESULTS.glob(f"{question}_*.json"))[-1].read_text(encoding="utf-8"))


def lines(question: str, *keys: str) -> list[dict[str, Any]]:
    """The cases of the newest results, without those that failed."""
    found = forked.read_lines(sorted(RESULTS.glob(f"{question}_*.jsonl"))[-1], *keys)
    return [line for line in found if "error" not in line]


def packed_lines() -> list[dict[str, Any]]:
    """Cases of the newest day of `packed_speed.py`: of ours that ran again the last, of peers' the fastest run."""
    newest_day = sorted(RESULTS.glob("packed_speed_h200_*.jsonl"))[-1].stem.split("_")[3]
    keys = ("model", "side", "cap", "lengths")
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in sorted(RESULTS.glob(f"packed_speed_h200_{newest_day}*.jsonl")):
        for line in forked.read_lines(path, *keys):
            key = tuple(line[k] for k in keys)
            before = found.get(key, {}).get("tokens_per_s", 0.0)
            if "error" not in line and not (key[1] in PEERS and line["tokens_per_s"] < before):
                found[key] = line
    return list(found.values())


def num_steps(line: dict[str, Any]) -> int:
    """Steps of a run of `packed_speed.py`."""
    return int(line.get("num_steps", FEW_STEPS))


def fastest(found: dict[tuple[Any, ...], dict[str, Any]], model: str, sides: tuple[str, ...], lengths: str) -> Any:
    """The fastest of some sides under the cap; None where none ran."""
    ran = [found[model, side, CAP, lengths] for side in sides if (model, side, CAP, lengths) in found]
    return max(ran, key=lambda line: line["tokens_per_s"], default=None)


def packed() -> str:
    """Training without padding beside the peers, and what is predicted of it."""
    found = _by_side(packed_lines())
    rows = []
    for lengths, about in (("real", "1,000 reviews, 287 tokens on average"), ("full", "all of 512 tokens")):
        for model, shown in SHOWN.items():
            ours = fastest(found, model, OURS, lengths)
            row: list[Any] = [_thousands(ours["tokens_per_s"]), "yes" if ours["settings"]["graphs"] else "no"]
            row += [_peer(found.get((model, side, CAP, lengths)), ours) for side in PEERS]
            rows.append([f"{shown}, {about}", *row])
    return "\n".join(
        [
            table(["real tokens a second in 11.17 GiB", "vramfit", "recorded", *PEERS.values()], rows),
            "",
            paragraph(*_about_packed(found)),
        ]
    )


def _peer(peer: dict[str, Any] | None, ours: dict[str, Any]) -> str | None:
    if peer is None:
        return None
    mark = "\\*" if num_steps(peer) == FEW_STEPS else ""
    return f"{_thousands(peer['tokens_per_s'])}{mark} ({ours['tokens_per_s'] / peer['tokens_per_s']:.1f}×)"


def _about_packed(found: dict[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    ours = [line for key, line in found.items() if key[1] in OURS and line["settings"]["fused"]]
    assert len(ours) == len([key for key in found if key[1] in OURS])
    apart = [line["predicted_allocated_bytes"] / line["max_allocated_bytes"] - 1 for line in ours]
    assert min(apart) >= 0
    starts = [line["rehearsal_s"] for line in ours]
    peers = {key: line for key, line in found.items() if key[1] in PEERS}
    searches = [line["search_s"] for line in peers.values()]
    few = {(SHOWN[key[0]], key[1], key[3]) for key, line in peers.items() if num_steps(line) == FEW_STEPS}
    assert few == {("BERT-large", "accelerate", "full")}
    steps = sorted({n["micro_batch"] * n.get("accumulate", 1) for key, n in peers.items() if key[1] != "accelerate"})
    base, plain = (found["bert-base-uncased", side, CAP, "real"] for side in OURS[::-1])
    assert base["tokens_per_s"] > plain["tokens_per_s"]
    beside = {side: _thousands(_runs(side)[-1]["tokens_per_s"]) for side in ("trainer", "accelerate")}
    compiled = found["bert-base-uncased", "recorded-compiled", CAP, "real"]
    large = found["bert-large-uncased", "planned", 0, "real"]
    profile = {kind: f"{1000 * seconds:.0f}" for kind, seconds in large["profile_s"].items() if kind != "longest"}
    counted = {model: _counted(found, model) for model in SHOWN}
    return [
        "One H200 (`benchmarks/packed_speed.py`), an effective batch of 64, bf16 autocast, fused AdamW, steps sent",
        f"without waiting for the one before, until there are {MOST_STEPS} or {ENOUGH_S:.0f} s have passed. Ours are",
        "packed, with fused layers; where it says so, passes are recorded as CUDA graphs (BERT-base, not",
        f"recorded: {_thousands(plain['tokens_per_s'])}). Each peer has the batch it found in {min(searches):.0f} to",
        f"{max(searches):.0f} s; the Trainer and Lightning make the nearest to 64 that this gives",
        f"({', '.join(map(str, steps[:-1]))} or {steps[-1]} samples a step). Hosts differ, so a peer stands with the",
        f"fastest of its runs: right after ours of the first row, the Trainer made {beside['trainer']} and Accelerate",
        f"{beside['accelerate']}. What has a \\* is of {FEW_STEPS} steps on another day, in which libraries still load",
        f"kernels, and waits for every step. Before the first step ours took {min(starts):.0f} to {max(starts):.0f} s,",
        f"for kernels that are compiled and a rehearsal: counted over {COUNTED / 1e6:.0f} million tokens, BERT-base",
        f"makes {counted['bert-base-uncased']} times the fastest peer's in the table, BERT-large",
        f"{counted['bert-large-uncased']}. (With `--compile`, recorded but not fused, BERT-base made",
        f"{_thousands(compiled['tokens_per_s'])} after {compiled['rehearsal_s']:.0f} s of compiling.) Allocated peaks",
        f"were predicted {max(apart):.3%} too high at most, none too low. Without",
        f"a cap, BERT-large makes {_thousands(large['tokens_per_s'])}, {large['utilisation']:.0%} of the GPU's peak:",
        f"of {profile['step']} ms a step, matrix products take {profile['matmul']}, attention {profile['attention']},",
        f"what lies between them {profile['other']}, the optimizer {profile['optimizer']}, copies {profile['copies']};",
        f"{profile['idle']} are idle.",
    ]


def _runs(side: str) -> list[dict[str, Any]]:
    """All runs of a side on the reviews with BERT-base, under the cap."""
    keys = ("model", "side", "cap", "lengths")
    paths = sorted(RESULTS.glob("packed_speed_h200_*.jsonl"))
    found = [line for path in paths for line in forked.read_lines(path, *keys) if "error" not in line]
    return [line for line in found if tuple(line[k] for k in keys) == ("bert-base-uncased", side, CAP, "real")]


def _counted(found: dict[tuple[Any, ...], dict[str, Any]], model: str) -> str:
    """How many times the fastest peer's tokens a second a run makes, what comes before its first step with it."""
    ours, peer = (fastest(found, model, sides, "real") for sides in (OURS, tuple(PEERS)))
    seconds = ours["rehearsal_s"] + COUNTED / ours["tokens_per_s"]
    return f"{COUNTED / seconds / peer['tokens_per_s']:.1f}"


def predicted() -> str:
    """`vramfit predict` beside pipelines."""
    found = {line["side"]: line for line in lines("inference_speed_h200", "model", "side", "cap")}
    ours, pipeline, loop = found["packed"], found["pipeline"], found["loop"]
    return paragraph(
        "`vramfit predict` on the same reviews, BERT-base in bf16 under the same cap",
        "(`benchmarks/inference_speed.py`),",
        f"makes {_thousands(ours['tokens_per_s'])} real tokens a second from file to labels,",
        f"{_ratio(ours, pipeline)} times",
        f"what a `transformers` pipeline makes with its best batch ({pipeline['batch']}); of tokens that are",
        "there already,",
        f"{ours['forward_tokens_per_s'] / loop['forward_tokens_per_s']:.1f} times a padded loop's.",
    )


def _ratio(one: dict[str, Any], other: dict[str, Any]) -> str:
    return f"{one['tokens_per_s'] / other['tokens_per_s']:.1f}"


def offloaded() -> str:
    """Budgets below the optimizer's state, and the smallest ones."""
    found = {line["name"]: line for line in lines("offloaded_h200", "name")}
    shown = {
        "bert-large-uncased free": "BERT-large, no budget",
        "bert-large-uncased 2.5GiB": "BERT-large in 2.5 GiB, nothing on the host",
        "bert-large-uncased 1GiB": "BERT-large in 1 GiB",
        "xlm-roberta-large 2GiB": "XLM-RoBERTa-large in 2 GiB",
    }
    shown |= {name: f"the least for {name.removeprefix(SMALLEST)}" for name in found if name.startswith(SMALLEST)}
    rows = [
        [
            about,
            f"{found[name]['allocated_bytes'] / GIB:.3f} GiB",
            f"{(found[name]['predicted_allocated_bytes'] - found[name]['allocated_bytes']) / 1024:.0f} KiB more",
            f"{found[name]['predicted_host_bytes'] / GIB:.1f} GiB" if found[name]["predicted_host_bytes"] else None,
            f"{found[name]['step_s']:.2f} s",
            f"{found[name]['tokens_per_s']:,.0f}",
        ]
        for name, about in shown.items()
    ]
    ours, theirs = (
        sorted(line["step_s"] for name, line in found.items() if name.startswith(f"beside {whose} "))
        for whose in ("ours", "torchao")
    )
    return "\n".join(
        [
            table(["", "allocated", "predicted", "host memory", "a step", "tokens/s"], rows),
            "",
            paragraph(
                "One H200 (`benchmarks/offloaded_runs.py`), all parameters, 512 tokens, effective batch 32,",
                "clipping on; the",
                "smallest budgets were found by planning, and had an allocator retry or none. Over 200 steps",
                "without dropout,",
                *_curves(found),
                f"With the optimizer in host memory, a step of 8 samples took {median(ours):.2f} s with",
                "masters and moments",
                "in fp32 there; torchao's `CPUOffloadOptimizer`, which keeps them in bf16 and neither clips",
                "nor accumulates,",
                f"took {median(theirs):.2f} s for as much on the device (medians of {len(ours)} rounds in turns:",
                f"{ours[0]:.2f} to {ours[-1]:.2f} s and {theirs[0]:.2f} to {theirs[-1]:.2f} s).",
            ),
        ]
    )


def _curves(found: dict[str, dict[str, Any]]) -> list[str]:
    free = found["curve bert-large-uncased free"]["losses"]
    apart = {}
    for budget in ("2.5GiB", "1GiB", "halves"):
        losses = found[f"curve bert-large-uncased {budget}"]["losses"]
        differences = [abs(a - b) for a, b in zip(losses, free, strict=True)]
        apart[budget] = f"{max(differences):.2f} at most, {mean(differences):.3f} on average"
    return [
        "losses differed from those without a budget by",
        f"{apart['1GiB']}, in 1 GiB, and by {apart['2.5GiB']}, in 2.5 GiB (with bf16 weights and 8-bit moments).",
        f"The same run in passes of half the size, which is rounding alone, differed by {apart['halves']}: weights",
        f"are drawn at random, and losses jump between {min(free):.2f} and {max(free):.2f}.",
    ]


def fitted() -> str:
    """A Trainer script with its one line, beside `auto_find_batch_size`."""
    found = {
        (line["task"], line["cap"], line["side"]): line for line in lines("trainer_runs_h200", "task", "cap", "side")
    }
    tasks = ("sequence-classification", "token-classification")
    caps = sorted({cap for _, cap, side in found if side == "auto"})
    rows = []
    for cap in caps:
        row = [f"{cap / GIB:.4g} GiB"]
        for task in tasks:
            ours, theirs = (found[task, cap, side]["tokens_per_s"] for side in ("fitted", "auto"))
            row += [_thousands(ours), f"{_thousands(theirs)} ({ours / theirs:.2f}×)"]
        rows.append(row)
    ours, autos, disturbed = (
        [line for key, line in found.items() if key[2] == side] for side in ("fitted", "auto", "disturbed")
    )
    (plain,), (whole,) = (
        [line for key, line in found.items() if key[2] == side] for side in ("plain-evaluated", "evaluated")
    )
    assert plain["ran_out"]
    assert not whole["ran_out"]
    assert not any(line["num_ooms"] or line["num_padded"] for line in ours)
    smaller = sorted(line["batch"] for line in autos if line["batch"] < 64)
    (most,) = {line["num_steps"] for line in ours}
    amid = [line for line in disturbed if line["cap"] == int(11.17 * GIB)]
    taken = min(line["taken_bytes"] for line in amid) / GIB
    (again,) = {line["num_recoveries"] for line in amid}
    assert all(line["num_steps"] == most for line in disturbed)
    return "\n".join(
        [
            table(
                [
                    "real tokens a second",
                    *(f"{about}, {side}" for about in ("texts", "tokens") for side in ("fitted", "auto")),
                ],
                rows,
            ),
            "",
            paragraph(
                "BERT-base on one H200 (`benchmarks/trainer_runs.py`), bf16, 64 samples a step of up to 512 tokens;",
                "scripts that classify texts and tokens, with the one line or with `auto_find_batch_size`, in short",
                f"runs of {most} steps, or as many samples. With the line, none ran out of memory and every step",
                "learned from its 64 samples; without it, batches shrank",
                f"to {smaller[0]} to {smaller[-1]} in the small caps. Fitted steps are packed and fused; from 8 GiB on",
                f"their settings are the same, and rows differ by what else the host had to do. With {taken:.1f} of",
                f"11.17 GiB taken away for five steps, {again} were done again (inside 6 and 8 GiB up to",
                f"{max(line['num_recoveries'] for line in disturbed)}), and none was lost. Evaluation of",
                "10,000 texts of 200 labels a token in 3 GiB: the plain script runs out of memory after",
                f"{plain['after_s']:.0f} s, the fitted one ends, with {whole['max_reserved_bytes'] / GIB:.1f} GiB.",
            ),
        ]
    )


def served() -> str:
    """A server on a GPU, beside one request at a time."""
    r = newest("serving_h200")
    hard, plain = r["hard"], r["plain"]
    return paragraph(
        f"On an H200 capped at {r['memory'].replace('GiB', ' GiB')} (`benchmarks/serving.py`), {r['clients']}",
        "clients sent",
        f"MiniLM {hard['num_requests']:,} requests, with broken JSON, empty texts and texts of 100,000 words",
        "among them:",
        f"{hard['num_5xx']} errors of the server, {hard['num_lost'] + hard['num_wrong']} answers lost or wrong.",
        "Of plain",
        f"requests it answered {plain['requests_per_s']:,.0f} a second, {plain['times_as_fast']:.1f} times what",
        f"`transformers` answers one at a time; half within {1000 * plain['p50_s']:.0f} ms, 99 % within",
        f"{1000 * plain['p99_s']:.0f} ms.",
    )


def watched() -> str:
    """What the watch costs."""
    r = newest("watch_overhead_h200")["base_128_bf16"]
    share = r["overhead"]["light"]
    cost = f"{share:.1%} of" if share > 0.001 else "nothing that can be told from noise in"
    return paragraph(
        f"On an H200 (`benchmarks/watch_overhead.py`) a light watch costs {cost} a BERT-base step of",
        f"{1000 * r['seconds']['plain']:.0f} ms, and sees the peak that torch counts, to the byte; a detailed one",
        f"makes the step {1 + r['overhead']['detailed']:.0f} times as long.",
    )


def _by_side(found: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {(n["model"], n["side"], n["cap"], n["lengths"]): n for n in found}


def _thousands(rate: float) -> str:
    return f"{round(rate, -3):,.0f}"
