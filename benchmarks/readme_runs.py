"""Blocks of `docs/speed.md` about runs on a GPU: packed, offloaded, fitted, served, watched."""

import json
from pathlib import Path
from statistics import mean, median
from typing import Any

import forked
from pages import bullets, paragraph, table

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
            table(["real tokens/s in 11.17 GiB", "vramfit", "CUDA graphs", *PEERS.values()], rows),
            "",
            paragraph(
                "One H200 (`benchmarks/packed_speed.py`), effective batch 64, bf16 autocast, fused AdamW. A run ends "
                "after",
                f"{MOST_STEPS} steps or {ENOUGH_S:.0f} s. Tokens of padding do not count.",
            ),
            "",
            bullets(*_about_packed(found)),
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
        "vramfit packs sequences and fuses layers. Without CUDA graphs, BERT-base reaches "
        f"{_thousands(plain['tokens_per_s'])} tokens/s.",
        f"Each peer uses the batch size that it found itself, in {min(searches):.0f} to {max(searches):.0f} s. The "
        f"Trainer and Lightning then take {', '.join(map(str, steps[:-1]))} or {steps[-1]} samples a step, the "
        "nearest to 64 that this batch size allows.",
        f"Hosts differ in speed, so the table shows each peer's fastest run. Right after our run of the first row, the "
        f"Trainer reached {beside['trainer']} and Accelerate {beside['accelerate']}.",
        f"\\* Measured over {FEW_STEPS} steps on another day, kernel loading included, with a synchronization after "
        "each step.",
        f"Before its first step vramfit spends {min(starts):.0f} to {max(starts):.0f} s on compiling kernels and "
        f"trying the longest batch. Over {COUNTED / 1e6:.0f} million tokens, this start included, it trains BERT-base "
        f"at {counted['bert-base-uncased']} times the rate of the fastest peer, and BERT-large at "
        f"{counted['bert-large-uncased']} times.",
        f"With `--compile` instead of fused layers, BERT-base reaches {_thousands(compiled['tokens_per_s'])} tokens/s "
        f"after {compiled['rehearsal_s']:.0f} s of compilation.",
        f"Predicted allocated peaks are at most {max(apart):.3%} too high, and never too low.",
        f"Without a memory cap BERT-large reaches {_thousands(large['tokens_per_s'])} tokens/s, "
        f"{large['utilisation']:.0%} of "
        f"the GPU's peak FLOPs. A step takes {profile['step']} ms: matrix multiplications {profile['matmul']}, "
        f"attention {profile['attention']}, other kernels {profile['other']}, optimizer {profile['optimizer']}, copies "
        f"{profile['copies']}, idle {profile['idle']}.",
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
        "`vramfit predict` labels the same reviews with BERT-base in bf16 under the same cap at",
        f"{_thousands(ours['tokens_per_s'])} real tokens/s from file to labels (`benchmarks/inference_speed.py`). A",
        f"`transformers` pipeline at its best batch size ({pipeline['batch']}) labels",
        f"{_thousands(pipeline['tokens_per_s'])} a second, so vramfit is {_ratio(ours, pipeline)} times as fast.",
        "Without tokenization, it is",
        f"{ours['forward_tokens_per_s'] / loop['forward_tokens_per_s']:.1f} times as fast as a loop over padded",
        "batches.",
    )


def _ratio(one: dict[str, Any], other: dict[str, Any]) -> str:
    return f"{one['tokens_per_s'] / other['tokens_per_s']:.1f}"


def offloaded() -> str:
    """Budgets below the optimizer's state, and the smallest ones."""
    found = {line["name"]: line for line in lines("offloaded_h200", "name")}
    shown = {
        "bert-large-uncased free": "BERT-large, no budget",
        "bert-large-uncased 2.5GiB": "BERT-large in 2.5 GiB, without offloading",
        "bert-large-uncased 1GiB": "BERT-large in 1 GiB",
        "xlm-roberta-large 2GiB": "XLM-RoBERTa-large in 2 GiB",
    }
    shown |= {name: f"smallest budget for {name.removeprefix(SMALLEST)}" for name in found if name.startswith(SMALLEST)}
    rows = [
        [
            about,
            f"{found[name]['allocated_bytes'] / GIB:.3f} GiB",
            f"{(found[name]['predicted_allocated_bytes'] - found[name]['allocated_bytes']) / 1024:.0f} KiB above",
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
            table(["", "allocated", "prediction is", "host memory", "a step", "tokens/s"], rows),
            "",
            paragraph(
                "One H200 (`benchmarks/offloaded_runs.py`): all parameters trained, 512 tokens, effective batch 32,",
                "gradients clipped. The smallest budgets were found by planning; these runs had at most one allocator",
                "retry.",
            ),
            "",
            bullets(
                *_curves(found),
                f"A step of 8 samples with the optimizer in host memory takes {median(ours):.2f} s ({ours[0]:.2f} to "
                f"{ours[-1]:.2f}, {len(ours)} rounds in turns), with fp32 master weights and moments. torchao's "
                f"`CPUOffloadOptimizer` takes {median(theirs):.2f} s ({theirs[0]:.2f} to {theirs[-1]:.2f}) for the "
                "same device memory; it keeps moments in bf16, and neither clips nor accumulates.",
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
        "Over 200 steps without dropout, the loss in 1 GiB differs from the loss without a budget by "
        f"{apart['1GiB']}; in 2.5 GiB, with bf16 weights and 8-bit moments, by {apart['2.5GiB']}. Halving the "
        f"micro-batch, which changes only rounding, makes a difference of {apart['halves']}. (Weights are random; "
        f"losses vary between {min(free):.2f} and {max(free):.2f}.)",
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
                    "real tokens/s in",
                    *(f"{about}: {side}" for about in ("texts", "tokens") for side in ("`fit_trainer`", "auto")),
                ],
                rows,
            ),
            "",
            paragraph(
                "BERT-base on one H200 (`benchmarks/trainer_runs.py`), bf16, 64 samples of up to 512 tokens a step, "
                "runs of",
                f"{most} steps. *texts* and *tokens* are scripts for text and token classification; *auto* is the "
                "Trainer",
                "with `auto_find_batch_size`.",
            ),
            "",
            bullets(
                "With `fit_trainer`, no run ran out of memory and every step used its 64 samples. With "
                f"`auto_find_batch_size`, steps shrank to {smaller[0]} to {smaller[-1]} samples under the smaller "
                "caps.",
                "Fitted steps are packed and fused. From 8 GiB on their settings are the same; there, rows differ only "
                "by the load of the host.",
                f"When {taken:.1f} of 11.17 GiB were taken away for five steps, {again} steps were repeated (up to "
                f"{max(line['num_recoveries'] for line in disturbed)} under caps of 6 and 8 GiB), and none was lost.",
                "Evaluation of 10,000 texts with 200 labels a token in 3 GiB: the plain script runs out of memory "
                f"after {plain['after_s']:.0f} s; the fitted script finishes and reserves "
                f"{whole['max_reserved_bytes'] / GIB:.1f} GiB.",
            ),
        ]
    )


def served() -> str:
    """A server on a GPU, beside one request at a time."""
    r = newest("serving_h200")
    hard, plain = r["hard"], r["plain"]
    return paragraph(
        f"On an H200 capped at {r['memory'].replace('GiB', ' GiB')} (`benchmarks/serving.py`), {r['clients']} clients "
        "sent",
        f"MiniLM {hard['num_requests']:,} requests, among them broken JSON, empty texts and texts of 100,000 words:",
        f"{hard['num_5xx']} server errors, {hard['num_lost'] + hard['num_wrong']} answers lost or wrong. It answered",
        f"{plain['requests_per_s']:,.0f} ordinary requests a second, {plain['times_as_fast']:.1f} times the rate of",
        f"`transformers` with one request at a time; p50 {1000 * plain['p50_s']:.0f} ms, p99",
        f"{1000 * plain['p99_s']:.0f} ms.",
    )


def watched() -> str:
    """What the watch costs."""
    r = newest("watch_overhead_h200")["base_128_bf16"]
    share = r["overhead"]["light"]
    cost = f"{share:.1%}" if share > 0.001 else "no measurable time"
    return paragraph(
        f"On an H200 (`benchmarks/watch_overhead.py`) a light watch adds {cost} to a BERT-base step of",
        f"{1000 * r['seconds']['plain']:.0f} ms and sees the peak that torch counts, to the byte. A detailed watch "
        "makes the",
        f"step {1 + r['overhead']['detailed']:.0f} times as long.",
    )


def _by_side(found: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {(n["model"], n["side"], n["cap"], n["lengths"]): n for n in found}


def _thousands(rate: float) -> str:
    return f"{round(rate, -3):,.0f}"


def started() -> str:
    """Whole programs: the first step and the end."""
    rows = []
    for line in lines("start_h200", "case", "turn"):
        ours, theirs = line["vramfit"], line["trainer"]
        for what, key in (("first step", "first_step_s"), ("end", "whole_s")):
            times = f"{ours[key] / theirs[key]:.2f}×"
            rows.append([f"{line['case']}, {what}", f"{ours[key]:.1f} s", f"{theirs[key]:.1f} s", times])
    said = paragraph(
        "`vramfit train` beside a script with the Trainer on an H200, in turns, timed from the command",
        "(`benchmarks/start.py`; rte: ELECTRA-base, six epochs in 5 GiB, effective batch 32). vramfit had no",
        "remembered plan: it spends the time before its first step on planning, trying out kernels and the largest",
        "batch, and capturing CUDA graphs. One turn each.",
    )
    return f"{table(['', 'vramfit', 'the Trainer', 'vramfit takes'], rows)}\n\n{said}"


def encoded() -> str:
    """Texts to vectors, and pairs to scores, beside sentence-transformers."""
    rows = []
    for line in lines("encoding_h200", "model", "work", "cap", "seq"):
        speeds = {name: side["tokens_per_s"] for name, side in line["sides"].items() if "tokens_per_s" in side}
        best, default = speeds[line["best"]], speeds["batch-32"]
        own = speeds["vramfit"]
        of_best = f"{best:,.0f} ({line['best'].partition('-')[2]}; {own / best:.2f}×)"
        rows.append([line["model"], line["work"], f"{own:,.0f}", of_best, f"{default:,.0f} ({own / default:.2f}×)"])
    head = ["", "work", "vramfit", "sentence-transformers, best batch", "default batch of 32"]
    said = paragraph(
        "Real tokens/s on an H200, bf16, in turns (`benchmarks/encoding.py`): 800 reviews cut at 512 tokens, or 2,490",
        "pairs, strings to arrays. The GPU mostly waits: tokenizing and other work of the host take most of the time.",
        "The host's work was made less since, which was not measured on a GPU yet.",
    )
    return f"{table(head, rows)}\n\n{said}"
