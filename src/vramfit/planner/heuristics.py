"""Every number of the planner that was tuned, and the measurement it stands on.

`results/` is `benchmarks/results/`. "Not measured" means just that: a judgement, or single runs that no file keeps.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a value of a setting must save in time to be taken, as a share of it: near ties go to simpler settings."""

    keyword: str
    values: tuple[str, ...] = ()
    """Values that have the price; empty for all but None."""
    share: float
    rehearsed: float
    """The same on an emulated GPU, which computes on the CPU: what is slow there is for where nothing else fits."""
    words: str


PRICES = {
    "checkpointing": Price(
        keyword="checkpointing", share=0.02, rehearsed=1.5, words="layers that are computed twice"
    ),  # not measured
    "adamw-8bit": Price(
        keyword="optimizer", values=("adamw-8bit",), share=0.15, rehearsed=7.0, words="moments in 8 bits"
    ),  # not measured: moments are not rounded for a few percent
    "weights": Price(
        keyword="offload", values=("weights",), share=0.25, rehearsed=0.25, words="layers that wait in host memory"
    ),  # results/offloaded_h200_2026-11-15.jsonl: such steps took 1.03 to 1.9 times what was predicted
    "amp": Price(
        keyword="precision", values=("amp-bf16", "amp-fp16"), share=0.02, rehearsed=20.0, words="autocast"
    ),  # not measured
}
SHARDS_PRICE = 1.1
"""Shards must be predicted faster than replicas by this: what they copy in and out of buffers is not timed. Not
measured."""

COMPILE_S = 30.0
"""Seconds to compile before the first step, training and evaluation together: for training alone, 6 to 16 s
(results/packed_speed_h200_2026-11-16.jsonl, `rehearsal_s` of compiled runs)."""
LEAST_COMPILED_S = 10 * COMPILE_S
"""Shorter runs are not compiled: compiled steps took 9 to 18 % less time
(results/packed_speed_h200_2026-11-16.jsonl)."""
LEAST_RECORDED_S = 10.0
"""Shorter runs are not captured as CUDA graphs: they took 1.7 to 6.5 s before the first step
(results/packed_speed_h200_2026-11-16_recorded.jsonl and _together.jsonl)."""
NEAR_HOST = 0.8
"""The host's share of the device's time from which passes are captured. Host times differ: of one plan of BERT-base
that waits for the host, these two files have 402,000 and 487,000 tokens a second. The share is not measured."""
SLOWER = 1.05
"""What captured passes may be predicted to take more, since rows are filled up to a few sizes: they were predicted 3 %
slower, and were 39 % faster (results/packed_speed_h200_2026-11-16_recorded.jsonl, BERT-base on real lengths)."""
TIGHT_PRICE = 3.0
"""How many times as fast a plan has to be that leaves nothing for batches of other lengths: on an H200 such runs took
up to 2.1 times as long as predicted (captured ones 12 times, which are left out); no file keeps these runs."""
PADDED_SHARE, FUSED_SHARE = 2, 4
"""Where a fitted Trainer packs, a batch that cannot be packed has so many times fewer tokens a pass: its masks take
memory that was not planned and, where layers were to be fused, plain ones take more. Not measured."""
SURE = 0.99
"""Of the least that padded passes take, where it decides that none are looked at: for one job it was 0.3 % above what
was found. From predictions, not measured."""
WORTH_PACKING = 0.04
"""The share of padding from which sequences are packed: at full length, packed passes are predicted to take up to 4 %
longer. From predictions, not measured."""

BASIS_SHARE = {"verified": 0.01, "derived": 0.05, "outside": 0.25}
"""Of the budget, for errors of prediction, where GPU and torch were compared with measurements
(results/recorded_truth_h200.json, results/random_cases_h200_2026-11-15.json); elsewhere, which is not measured; and
where nothing is promised, since PyTorch 1.x took more than predicted in published runs. That share is not measured."""
LENGTHS_SHARE = {"expandable": 0.03, "default": 0.10}
"""Of the budget, for batches of varied lengths. Reserved memory after 100 replayed windows of varied lengths grew by up
to 3 % with expandable segments, and by up to 30 % without, most of which the allocator gives back when it runs short.
Runs on an H200: results/varied_runs_h200_2026-11-17.jsonl."""
LEAST_FOR_LENGTHS = 48 * 2**20
"""At least so much for lengths: segments grow by 20 MiB, and runs inside 1 to 2 GiB on an H200 reserved 36 to 40 MiB
more than full windows; no file keeps these runs."""
LEAST_SHARE = 0.05
"""But no larger a share of a small budget: runs inside 240 to 500 MiB on an H200 reserved 2 to 14 MiB more, 3.5 % at
most; no file keeps these runs."""

MAX_TRACED_BETWEEN = 6
"""Recipes with some layers checkpointed that are traced before only none or all are tried: bounds the time of a plan
(results/speed_of_planning_2026-11-16.json)."""
MUCH_SMALLER = 0.75
"""A second pass below this share of the first is taken not to decide the peak. Not measured; what is chosen is
predicted in full."""
MANY_SIZES, LEAST_STEP = 64, 0.05
"""Of more micro-batches than this, larger ones are tried in steps of a share: a batch of a million has two thousand.
Not measured."""
MAX_COMPARED = 3
"""Choices that are timed on real lengths: the fastest at full length are near the fastest on any. Not measured."""
LENGTH_SHARES = (0.125, 0.25, 0.5, 1.0)
"""Of the full length: where passes are traced; between them, time goes in straight lines. Not measured."""
MOST_BATCHES = 0.95
"""The share of batches that need no more passes than a packed plan is timed with. Not measured."""
LEAST_OF_MEAN = 0.95
"""Of the mean length of texts: with fewer tokens a text, a packed pass that compares texts is full. Not measured."""
MAX_EVALUATION_TIMES, MAX_EVALUATION_BATCH = 4, 256
"""An evaluation batch is at most so many training batches, and so many samples: beyond, nothing is gained. Not
measured."""
LORA_RANK = 16
"""Of adapters that the planner adds: twice peft's default, still below one percent of the weights. Not measured."""
