"""Every model type with a classification head, planned and trained for a step on an emulated GPU; no GPU is needed.

For a tiny configuration of each type (`tiny_families.py`): a plan, a step of the `Stepper` as planned inside an
`EmulatedGPU` of the plan's memory, and gradients in fp32 without dropout beside those of transformers' own loss of the
whole batch: of passes of a few samples, with layers computed twice (checkpointing) and with rows packed, where the type
has them. A relative difference is that of all gradients together.

    python benchmarks/family_steps.py                 # all types; writes benchmarks/results/family_steps.json
    python benchmarks/family_steps.py llama gpt2      # some; writes nothing
"""

import json
import math
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.tiny_families import END, FIRST_TOKEN, PADDING, all_types, tiny_config

RESULTS = Path(__file__).parent / "results" / "family_steps.json"
TASK = "sequence-classification"
GPU, MEMORY, PRECISION = "t4", "256MiB", "fp32"
LENGTHS, WIDTH, SPLIT = (24, 21, 17, 13, 9, 6, 4, 3), 24, 3
"""Tokens of each text of the batch, columns of the batch, and texts in a pass."""
MOST = 1e-5
"""The relative difference that counts as the same gradient: rounding in fp32."""


def make_batch(vocab_size: int) -> dict[str, torch.Tensor]:
    """Texts of varied lengths, each with a token that ends it, padded on the right."""
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(FIRST_TOKEN, vocab_size, (len(LENGTHS), WIDTH), generator=drawn)
    mask = torch.ones_like(ids)
    for row, length in enumerate(LENGTHS):
        ids[row, length - 1], ids[row, length:], mask[row, length:] = END, PADDING, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(len(LENGTHS)) % 3}


def make_model(model_type: str) -> Any:
    """A tiny model with drawn weights, without dropout, in the mode in which the type can learn."""
    import vramfit

    model, _ = vramfit.load(tiny_config(model_type), task=TASK, random_weights=True, device="cpu", seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # far enough from zero for attention and experts to matter
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    model.train(model_type == "reformer")
    return model


def gradients_of(model: Any, batch: dict[str, torch.Tensor], micro_batch: int | None) -> dict[str, torch.Tensor]:
    """Those of a batch, by the names of parameters: None asks transformers for the loss of the whole batch."""
    import vramfit

    if micro_batch is None:
        model(**batch).loss.backward()
    else:
        vramfit.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=micro_batch).gradients(batch)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def difference(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of all gradients together, beside that of the right ones."""
    apart = [found[n] - right[n] if n in found and n in right else {**found, **right}[n] for n in {**found, **right}]
    off = torch.stack([part.norm() for part in apart]).norm()
    return float(off / torch.stack([part.norm() for part in right.values()]).norm())


def planned_step(model_type: str, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A plan for the batch, and one step by it inside an emulated GPU of as much memory."""
    import vramfit

    job: dict[str, Any] = {"task": TASK, "batch": len(LENGTHS), "seq": WIDTH, "precision": PRECISION}
    plan = vramfit.plan(tiny_config(model_type), gpu=GPU, memory=MEMORY, **job)
    model = make_model(model_type)
    with vramfit.EmulatedGPU(memory=MEMORY) as gpu:
        vramfit.prepare(model, plan)
        stepper = vramfit.Stepper(model, vramfit.make_optimizer(model, plan, lr=1e-3), plan)
        loss = stepper.step(batch)
    fits = stepper.num_recoveries == 0 and gpu.num_failures == 0
    return {"micro_batch": plan.workload.micro_batch, "fits": fits, "loss": loss}


def run(model_type: str) -> Iterator[tuple[str, Any]]:
    """What is found of a type, one thing after the other."""
    from vramfit.models.configuration import supported_attention
    from vramfit.settings import checkpointing
    from vramfit.techniques import packing

    batch = make_batch(128)
    model = make_model(model_type)
    right = gradients_of(model, batch, None)
    yield "split", difference(gradients_of(model, batch, SPLIT), right)
    if "packed" in supported_attention(model.config):
        packing.apply(model, TASK)
        yield "packed", difference(gradients_of(model, batch, SPLIT), right)
        packing.undo(model)
    if model.supports_gradient_checkpointing:
        checkpointing.apply(model, "full")
        was_training = model.training
        model.train()  # layers are computed twice only then; there is no dropout
        twice = gradients_of(model, batch, SPLIT)
        model.gradient_checkpointing_disable()
        yield "checkpointed", difference(twice, gradients_of(model, batch, SPLIT))
        model.train(was_training)
    yield "plan", planned_step(model_type, batch)


def main(asked: list[str]) -> None:
    """Go through the types, print a line for each, and write what was found of all of them."""
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    for model_type in asked or all_types():
        begun, row = time.perf_counter(), {}
        try:
            for name, value in run(model_type):
                row[name] = rounded(value)
        except Exception as error:  # whatever a family raises is what is to be known of it
            row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        found[model_type] = row
        print(f"{model_type:22} {time.perf_counter() - begun:5.1f} s  {row}", flush=True)
    counts = summary(found)
    print(counts)
    if not asked:
        made_with = {"torch": torch.__version__, "transformers": transformers.__version__}
        content = {"made_with": made_with, "summary": counts, "types": found}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """With three digits; None for what is no number."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, float):
        return float(f"{value:.2e}") if math.isfinite(value) else None
    return value


def is_same(row: dict[str, Any], name: str) -> bool:
    """Whether gradients were compared, and equal."""
    found = row.get(name)
    return found is not None and found <= MOST


def summary(found: dict[str, dict[str, Any]]) -> dict[str, int]:
    """How many types did what."""
    rows = list(found.values())
    same = {name: sum(is_same(row, name) for row in rows) for name in ("split", "packed", "checkpointed")}
    planned = sum(row.get("plan", {}).get("fits", False) for row in rows)
    whole = sum(row.get("plan", {}).get("fits", False) and is_same(row, "split") for row in rows)
    return {"types": len(rows), "planned_and_trained": planned, **same, "planned_trained_and_split": whole}


if __name__ == "__main__":
    main(sys.argv[1:])
