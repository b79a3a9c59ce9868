"""The recorded cases in vramfit's words: how their models were made and what they ran."""

import copy
import gzip
import json
from pathlib import Path
from typing import Any

from vramfit.cuda.kernels.script import CudaProfile
from vramfit.models.resolve import ResolvedModel, resolve
from vramfit.workload import Workload

HERE = Path(__file__).parent
H200 = CudaProfile(
    compute_capability=(9, 0), num_multiprocessors=132, max_threads_per_multiprocessor=2048, torch_version=(2, 11)
)
TASKS = {
    "cls": "sequence-classification",
    "tok": "token-classification",
    "qa": "question-answering",
    "mlm": "masked-lm",
    "pre": "pretraining",
}
MODES = {"train": "train", "fwd": "forward", "infer": "infer"}
NAMES = {"electra-base": "electra-base-discriminator"}


def load(name: str) -> list[dict[str, Any]]:
    """The cases of one file that ran."""
    found: list[dict[str, Any]] = json.loads((HERE / f"{name}.json").read_text())
    return [case for case in found if "error" not in case["result"]]


def load_stream(name: str) -> Any:
    """One recorded file of `streams`."""
    with gzip.open(HERE / "streams" / f"{name}.json.gz", "rt") as file:
        return json.load(file)


def workload_of(case: dict[str, Any], **changes: Any) -> Workload:
    """The workload a case ran. Its `batch` was one forward pass; ours is one step."""
    keywords: dict[str, Any] = {
        "model": NAMES.get(case["model"], case["model"]),
        "task": TASKS[case.get("task", "cls")],
        "mode": MODES[case.get("mode", "train")],
        "batch": case["batch"] * case.get("accum", 1),
        "accumulate": case.get("accum", 1),
        "seq": case["seq"],
        "precision": case.get("precision", "fp32").replace("_", "-"),
        "attention": case.get("attn", "sdpa"),
        "mask": {"full": "ones"}.get(case.get("mask", "full"), case.get("mask", "full")),
        "checkpointing": "full" if case.get("checkpointing") else None,
        "freeze": case.get("freeze"),
        "optimizer": case.get("optimizer", "adamw").replace("_", "-"),
        "gpu": "h200",
        "torch_version": "2.11.0",
    }
    return Workload(**(keywords | changes))


def model_of(case: dict[str, Any]) -> Any:
    """What the case ran as vramfit takes it: a configuration object, a copy."""
    config = copy.deepcopy(resolved_of(case).config)
    if case["model"] == "modernbert-base":
        config.classifier_pooling = "cls"  # the recorded runs took the library's default
    num_layers = case.get("nlayers")
    if num_layers:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
    return config


def resolved_of(case: dict[str, Any]) -> ResolvedModel:
    """The catalogue's model of a case."""
    return resolve(NAMES.get(case["model"], case["model"]), task=TASKS[case.get("task", "cls")])
