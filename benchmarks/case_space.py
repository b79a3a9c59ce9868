"""Workloads drawn at random over everything a prediction takes; the same seed gives the same cases."""

import random
from typing import Any

from vramfit.models.catalogue import CatalogueEntry, all_entries
from vramfit.units import GIB
from vramfit.workload import Workload

DRAWN_FROM = (
    "albert-base-v2",
    "all-minilm-l6-v2",
    "all-mpnet-base-v2",
    "bert-base-cased",
    "bert-base-chinese",
    "bert-base-multilingual-cased",
    "bert-base-multilingual-uncased",
    "bert-base-uncased",
    "bert-large-cased",
    "bert-large-uncased",
    "bert-medium",
    "bert-mini",
    "bert-small",
    "bert-tiny",
    "camembert-base",
    "deberta-v3-base",
    "deberta-v3-large",
    "deberta-v3-small",
    "deberta-v3-xsmall",
    "distilbert-base-cased",
    "distilbert-base-uncased",
    "distilroberta-base",
    "electra-base-discriminator",
    "electra-large-discriminator",
    "electra-small-discriminator",
    "minilm-l12-h384-uncased",
    "modernbert-base",
    "modernbert-embed-large",
    "modernbert-large",
    "mpnet-base",
    "roberta-base",
    "roberta-large",
    "xlm-roberta-base",
    "xlm-roberta-large",
)
"""The models that cases are drawn from: those of the catalogue when cases were first measured. A model that is added
there would change what a seed draws."""
EAGER_ONLY = ("deberta-v2", "mpnet")
NO_CHECKPOINTING = ("albert", "mpnet")
HEADS = ("sequence-classification", "token-classification", "question-answering", "masked-lm", "features")
PRETRAINED_WITH_OWN_HEAD = ("bert", "electra")
ATTENTION_PATTERNS = {"modernbert": "*attn*"}
BATCHES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48)
LENGTHS = (16, 33, 64, 77, 100, 128, 200, 256, 300, 381, 384, 510, 512)
LONG_LENGTHS = (777, 1024)
OPTIMIZERS = ("adamw", "adamw-fused", "adamw-single", "sgd", "adafactor")
TRAINING_PRECISIONS = ("fp32", "tf32", "amp-fp16", "amp-bf16", "bf16")
DEFAULT_BOUND_BYTES = 22 * GIB


def draw_cases(seed: int, count: int, *, bound_bytes: int = DEFAULT_BOUND_BYTES) -> list[Workload]:
    """`count` workloads; models come in shuffled rounds, so that each has its turn.

    Args:
        seed: of the draw.
        count: how many.
        bound_bytes: roughly the most that one may take; models whose weights alone come near it are left out.

    Raises:
        ValueError: a bound that no model keeps.
    """
    rng = random.Random(seed)
    entries = [e for e in all_entries() if e.name in DRAWN_FROM and 2 * _state_bytes(e) < bound_bytes]
    if not entries:
        raise ValueError(f"no model trains in {bound_bytes:,} bytes")
    deck: list[CatalogueEntry] = []
    cases: list[Workload] = []
    while len(cases) < count:
        if not deck:
            deck = rng.sample(entries, len(entries))
        entry = deck[-1]
        workload = Workload.from_keywords(**_draw(rng, entry))
        if rough_bytes(workload, entry) > bound_bytes or workload in cases:
            continue
        cases.append(workload)
        deck.pop()
    return cases


def rough_bytes(workload: Workload, entry: CatalogueEntry) -> int:
    """A rule of thumb, on the high side: only to keep a case small enough to run beside others."""
    w, width = workload, 2 if workload.precision in ("fp16", "bf16", "amp-fp16", "amp-bf16") else 4
    tokens = (w.micro_batch or w.batch) * w.seq
    scores = {"deberta-v2": 40, "mpnet": 16}.get(entry.family, 12 if w.attention == "eager" else 4)
    layer_bytes = tokens * (entry.hidden_size * 20 * width + entry.num_heads * w.seq * scores * width // 4)
    num_layers = 2 if w.mode == "infer" else entry.num_layers
    head_bytes = tokens * entry.vocab_size * 12 if w.task in ("masked-lm", "pretraining") else 0
    return _state_bytes(entry) + num_layers * layer_bytes + head_bytes


def _state_bytes(entry: CatalogueEntry) -> int:
    """Weights, gradients, AdamW's two moments and its temporaries."""
    return 20 * entry.num_parameters


def _draw(rng: random.Random, entry: CatalogueEntry) -> dict[str, Any]:
    mode = rng.choices(("train", "forward", "infer"), (75, 12, 13))[0]
    heads = HEADS + (("pretraining",) if entry.family in PRETRAINED_WITH_OWN_HEAD else ())
    task = rng.choices(heads, (5, 3, 3, 3, 1, 1)[: len(heads)])[0]
    lengths = LENGTHS + (LONG_LENGTHS if entry.max_positions >= max(LONG_LENGTHS) else ())
    keywords: dict[str, Any] = {
        "model": entry.name,
        "task": task,
        "mode": mode,
        "batch": rng.choice(BATCHES),
        "seq": rng.choice([n for n in lengths if n <= entry.max_positions]),
        "precision": rng.choice(TRAINING_PRECISIONS if mode == "train" else (*TRAINING_PRECISIONS, "fp16")),
        "attention": "eager" if entry.family in EAGER_ONLY else rng.choices(("sdpa", "eager"), (7, 3))[0],
        "mask": rng.choice(("none", "ones", "padded")),
        "dropout": mode == "infer" or rng.random() > 0.15,
        "allocator": rng.choices(("default", "expandable"), (75, 25))[0],
    }
    if task in ("sequence-classification", "token-classification"):
        keywords["num_labels"] = rng.choice((None, 3, 17))
    if mode != "infer":
        keywords |= _draw_savings(rng, entry, task)
    if mode == "train":
        keywords |= _draw_training(rng, keywords["batch"])
    return keywords


def _draw_savings(rng: random.Random, entry: CatalogueEntry, task: str) -> dict[str, Any]:
    """Checkpointing and freezing."""
    num_layers = 1 if entry.family == "albert" else entry.num_layers
    keywords: dict[str, Any] = {}
    if entry.family not in NO_CHECKPOINTING and rng.random() < 0.3:
        keywords["checkpointing"] = rng.choice(("full", rng.randint(1, num_layers)))
    if rng.random() < 0.35:
        kinds: list[Any] = [
            "embeddings",
            rng.randint(1, num_layers),
            ATTENTION_PATTERNS.get(entry.family, "*attention*"),
        ]
        if task != "features":  # beyond them nothing is left to learn
            kinds += ["encoder", "backbone"]
        elif kinds[1] == num_layers:
            kinds.pop(1)
        keywords["freeze"] = rng.choice(kinds)
    return keywords


def _draw_training(rng: random.Random, micro_batch: int) -> dict[str, Any]:
    """Optimizer, accumulation and clipping."""
    accumulate = rng.choices((1, 2, 3, 4), (60, 18, 12, 10))[0]
    return {
        "optimizer": rng.choices(OPTIMIZERS, (4, 3, 2, 2, 2))[0],
        "accumulate": accumulate,
        "batch": micro_batch * accumulate,
        "max_grad_norm": rng.choice((None, None, 1.0)),
    }
