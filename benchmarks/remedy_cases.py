"""Every remedy for memory that people are told of, as settings of `vramfit train` on real data; see `remedies.py`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fine_tuning
from fine_tuning import Options

DATASETS: dict[str, dict[str, Any]] = {
    "sst2": {"files": ("sst2/train.tsv", "sst2/dev.tsv"), "batch": 256, "lr": 2e-4, "epochs": 2, "max_rows": 24_000},
    "imdb": {"batch": 32, "lr": 2e-4, "epochs": 3},
    "rte": {
        "files": ("rte/train.tsv", "rte/dev.tsv"),
        "text_column": "sentence1,sentence2",
        "label_column": "label",
        "batch": 32,
        "lr": 1e-4,
        "epochs": 3,
    },
    "banking77": {
        "files": ("banking77/train.csv", "banking77/test.csv"),
        "label_column": "category",
        "batch": 64,
        "lr": 3e-4,
        "epochs": 5,
    },
    "wnut17": {
        "files": ("wnut17/wnut17train.conll", "wnut17/emerging.dev.conll"),
        "task": "token-classification",
        "batch": 32,
        "lr": 3e-4,
        "epochs": 5,
        "quick_rows": 400,
    },
    "xquad": {"task": "question-answering", "batch": 32, "lr": 2e-4, "epochs": 6},
}
METRICS = {"wnut17": "f1", "xquad": "f1"}
"""What is shown as accuracy, where that is not it."""
TEXTS = ("sst2", "imdb")
EVERYWHERE = tuple(DATASETS)
ROOM = "64GiB"
"""The budget of settings that are given: nothing else has to be planned."""
HEAD_LR, LORA_LR = 1e-2, 5e-4
SHARE = 3
"""`a third` is the memory of fp32 training, divided by this."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One row."""

    name: str
    kind: str
    """same maths | fewer bits | different training."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Beside fp32 and torch's own AdamW, the whole batch in one pass."""
    datasets: tuple[str, ...] = ("sst2",)
    plain: dict[str, Any] | None = None
    """Keywords of a loop written by hand, instead of `vramfit train`."""
    planned: bool = False
    """Nothing is given but a third of the memory."""
    num_gpus: int = 1
    """GPUs that share each batch; with several, only what each takes is predicted."""


SAME, FEWER, OTHER = "same maths", "fewer bits", "different training"
REMEDIES = (
    Remedy(name="a plain loop", kind=SAME, plain={}, datasets=TEXTS),
    Remedy(name="a plain loop, padded to the limit", kind=SAME, plain={"pad_to": True}, datasets=TEXTS),
    Remedy(name="fp32", kind=SAME, datasets=EVERYWHERE),
    Remedy(name="accumulation, 8 passes", kind=SAME, settings={"passes": 8}, datasets=TEXTS),
    Remedy(name="checkpointing", kind=SAME, settings={"checkpointing": "full"}, datasets=TEXTS),
    Remedy(name="fused AdamW", kind=SAME, settings={"optimizer": "adamw-fused"}),
    Remedy(name="data parallel, 2 GPUs", kind=SAME, datasets=TEXTS, num_gpus=2),
    Remedy(name="optimizer in host memory", kind=SAME, settings={"offload": "optimizer", "optimizer": "adamw-fused"}),
    Remedy(name="weights in host memory", kind=SAME, settings={"offload": "weights", "optimizer": "adamw-fused"}),
    Remedy(name="autocast bf16", kind=FEWER, settings={"precision": "amp-bf16"}, datasets=EVERYWHERE),
    Remedy(name="autocast fp16", kind=FEWER, settings={"precision": "amp-fp16"}, datasets=TEXTS),
    Remedy(name="8-bit AdamW", kind=FEWER, settings={"optimizer": "adamw-8bit"}),
    Remedy(name="weights in bf16", kind=OTHER, settings={"precision": "bf16"}),
    Remedy(name="Adafactor", kind=OTHER, settings={"optimizer": "adafactor"}),
    Remedy(name="a quarter of the batch", kind=OTHER, settings={"batch_over": 4}, datasets=TEXTS),
    Remedy(name="half of the length", kind=OTHER, settings={"seq_over": 2}, datasets=TEXTS),
    Remedy(name="a quarter of the length", kind=OTHER, settings={"seq_over": 4}, datasets=TEXTS),
    Remedy(name="embeddings frozen", kind=OTHER, settings={"freeze": "embeddings"}),
    Remedy(name="3 of 6 layers frozen", kind=OTHER, settings={"freeze": 3}),
    Remedy(name="encoder frozen", kind=OTHER, settings={"freeze": "encoder", "lr": HEAD_LR}),
    Remedy(name="all but the head frozen", kind=OTHER, settings={"freeze": "backbone", "lr": HEAD_LR}),
    Remedy(
        name="int8, only the head learns",
        kind=OTHER,
        settings={"freeze": "backbone", "quantize": "int8", "lr": HEAD_LR},
    ),
    Remedy(name="LoRA", kind=OTHER, settings={"lora": 8, "lr": LORA_LR}, datasets=TEXTS),
    Remedy(name="int8 and LoRA", kind=OTHER, settings={"lora": 8, "quantize": "int8", "lr": LORA_LR}),
    Remedy(name="planned for a third", kind=FEWER, planned=True, datasets=EVERYWHERE),
)
LONGEST = {"sst2": 64, "imdb": 512}
"""Tokens of the longest sample, about, where lengths are cut."""


def train_settings(remedy: Remedy, dataset: str, options: Options, third_bytes: int | None = None) -> dict[str, Any]:
    """What `vramfit train` is given."""
    data = DATASETS[dataset] | ({"batch": fine_tuning.QUICK["batch"]} if options.quick else {})
    data["lr"] /= options.lr_over
    if dataset == "imdb":
        data["files"] = fine_tuning.split_imdb(options)
    if dataset == "xquad":
        data["files"] = fine_tuning.split_xquad(options)
    if remedy.planned:
        return data | {"memory": third_bytes}
    settings = {"precision": "fp32", "optimizer": "adamw", "memory": ROOM, **data, **remedy.settings}
    settings["batch"] //= settings.pop("batch_over", 1)
    settings["micro_batch"] = settings["batch"] // settings.pop("passes", 1)
    if "seq_over" in settings:
        settings["seq"] = LONGEST[dataset] // settings.pop("seq_over")
    return settings


def plain_settings(remedy: Remedy, dataset: str, options: Options) -> dict[str, Any]:
    """What the loop written by hand is given."""
    settings = train_settings(REMEDIES[0], dataset, options)
    kept = {name: settings[name] for name in ("files", "batch", "lr", "epochs", "max_rows") if name in settings}
    pad = {"pad_to": max(128, LONGEST[dataset])} if (remedy.plain or {}).get("pad_to") else {}
    return {**kept, **pad, "model": options.model, "device": options.device, "folder": str(options.data)}


def cases(options: Options) -> list[tuple[Remedy, str, int]]:
    """Every remedy on its data sets, with every seed; what the others are measured against first."""
    return [
        (remedy, dataset, seed)
        for seed in options.seeds
        for dataset in DATASETS
        for remedy in REMEDIES
        if dataset in remedy.datasets and remedy.num_gpus == 1
    ]


def name_of(options: Options, remedy: Remedy, dataset: str, seed: int) -> str:
    """What a line of the results is called."""
    return f"{Path(options.model).name} {dataset} {remedy.name} seed {seed}"
