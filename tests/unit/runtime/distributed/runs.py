"""Whole runs as every rank of a test makes them: from a file to a saved model."""

import os
import signal
from typing import Any

import torch
from safetensors.torch import load_file

from vramfit.runtime.inference import Inference
from vramfit.runtime.stepper import Stepper
from vramfit.runtime.training.events import Note, Started
from vramfit.runtime.training.request import TrainRequest
from vramfit.runtime.training.train import train


def run(killed: int | None = None, after: int = 0, **keywords: Any) -> dict[str, Any]:
    """A run of `vramfit train`; the rank that is to be killed ends itself in the step after so many."""
    if killed is not None and killed == int(os.environ["RANK"]):
        _end_in_step(after + 1)
    said: list[Any] = []
    passed = _count_passed()
    record = train(TrainRequest(**keywords), on_event=said.append)
    heard = [e.text if isinstance(e, Note) else e.settings for e in said if isinstance(e, Note | Started)]
    return {
        "steps": record.num_steps,
        "settings": record.settings,
        "said": heard,
        "sessions": record.num_sessions,
        "evaluations": [result.metrics for result in record.evaluations],
        "num_passed": sum(passed),
    }


def _count_passed() -> list[int]:
    """Samples of each batch that this process will evaluate."""
    usual, passed = Inference._try, []

    def count(self: Inference, samples: Any, group: list[int], on_output: Any) -> Any:
        passed.append(len(group))
        return usual(self, samples, group, on_output)

    Inference._try = count  # type: ignore[method-assign]
    return passed


def _end_in_step(number: int) -> None:
    usual, calls = Stepper.advance, []

    def advance(self: Stepper, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(self, batch)

    Stepper.advance = advance  # type: ignore[method-assign]


def difference(ours: Any, theirs: Any) -> float:
    """‖w − w*‖ / ‖w*‖ over the weights of two saved models.

    Without the biases of keys: softmax takes them out, so their gradients are rounding, and AdamW makes steps of that;
    another micro-batch in one process moves them as much.
    """
    one, other = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert set(one) == set(other)
    names = [name for name in one if not name.endswith("key.bias")]
    changes = torch.stack([(one[name] - other[name]).norm() for name in names])
    return float(changes.norm() / torch.stack([other[name].norm() for name in names]).norm())


@torch.no_grad()
def difference_of_answers(ours: Any, theirs: Any) -> float:
    """The largest difference between the logits of two saved models, all their weights in use."""
    from transformers import AutoModelForSequenceClassification

    one, other = (AutoModelForSequenceClassification.from_pretrained(folder).eval() for folder in (ours, theirs))
    ids = torch.randint(5, one.config.vocab_size, (8, 12), generator=torch.Generator().manual_seed(0))
    return float((one(input_ids=ids).logits - other(input_ids=ids).logits).abs().max())
