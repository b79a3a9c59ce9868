"""The comparison of all vectors, traced by itself and put between passes, is what a trace of the whole step has."""

from typing import Any

import pytest
import torch

from vramfit.emulator.gpu import EmulatedGPU
from vramfit.estimator.predict import estimate
from vramfit.estimator.resolve import resolve_workload
from vramfit.estimator.traced import collection_paused
from vramfit.step.joint import JointPasses
from vramfit.step.splitting import Alone
from vramfit.step.step import Step
from vramfit.tasks.parts import contrastive
from vramfit.techniques.application import build_prepared
from vramfit.trace import comparison

JOBS: dict[str, dict[str, Any]] = {
    "padded": {"optimizer": "adamw"},
    "packed": {"precision": "amp-bf16", "attention": "packed", "optimizer": "adamw-fused", "seq": 16},
    "scored": {"loss": "cosent"},
    "triplets": {"loss": "triplet", "texts": 3, "matryoshka": (64, 128)},
    "scaled": {"precision": "amp-fp16", "loss": "in-batch-symmetric"},
}


@pytest.mark.parametrize("job", JOBS)
def test_passes_and_comparison_are_the_whole_step(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"task": "embedding", "loop": "stepper", "batch": 12, "micro_batch": 6, "seq": 32, **JOBS[job]}
    with collection_paused():
        traced, _ = resolve_workload("bert-tiny", asked)
        order = traced.order(2, 6)
        found = traced.template(6).instantiate(6, order)
        monkeypatch.setattr(comparison, "_on_paper", lambda loss: loss)
        whole = traced.trace(6).instantiate(6, order)
    assert found.events == whole.events
    assert found.parts == whole.parts
    assert [(m.kind, m.name) for m in found.marks] == [(m.kind, m.name) for m in whole.marks]


def test_vectors_wait_in_the_memory_that_is_predicted_for_them() -> None:
    small, large = (
        estimate("bert-tiny", task="embedding", loop="stepper", batch=n, micro_batch=4, seq=16, optimizer="sgd")
        for n in (4096, 16384)
    )
    more = 2 * (16384 - 4096) * 128 * 4  # texts, numbers of a vector, bytes of each
    grown = large.peak_requested_bytes - small.peak_requested_bytes
    assert more <= grown < 4 * more  # and nothing that grows with the square


def test_a_comparison_on_real_tensors_takes_what_was_predicted() -> None:
    """Weights, passes and the comparison of 2,000 pairs in blocks; a CPU computes it as a GPU does."""
    keywords = {"task": "embedding", "loop": "stepper", "batch": 2000, "micro_batch": 2, "seq": 8}
    with collection_paused(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(contrastive, "BLOCK_NUMBERS", 2**18)
        traced, _ = resolve_workload("bert-tiny", keywords)
        template = traced.template(2)
        predicted = peak(template.instantiate(2, [(f"steady.{name}", None) for name in comparison.SEGMENTS]).events)
        nothing = torch.nn.Linear(1, 1)
        loss = comparison.joint_loss(build_prepared(traced.resolved, traced.workload), traced.workload, 4000)
        assert loss.joint is not None
        joint = type(loss.joint)(4000, loss.joint.width, real(loss.joint.labels), loss.joint.of_vectors)
        gpu = EmulatedGPU(2**30)
        with gpu:
            for value in joint.labels.values():
                value.clone()  # the emulated GPU takes what it meets for its own, and these wait on the host
            before = gpu.requested_bytes
            gpu.reset_peaks()
            step = Step(nothing, torch.optim.SGD(nothing.parameters(), lr=0.0), ranks=Alone())
            step.place = torch.Tensor.clone
            passes = JointPasses(step, (), type(loss)(loss.sums, loss.counts, joint=joint), 0)
            passes.embed()
            passes.compare()
            passes.end()
            found = gpu.max_requested_bytes - before
    assert found == predicted


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_row_that_may_have_any_number_of_texts_is_traced(micro_batch: int) -> None:
    """Of 16 tokens each, 120 make 7 texts: no whole samples of 3."""
    keywords: dict[str, Any] = {"task": "embedding", "loop": "stepper", "batch": 8, "micro_batch": micro_batch}
    keywords |= {"texts": 3, "seq": 40, "attention": "packed", "precision": "amp-bf16"}
    traced, _ = resolve_workload("bert-tiny", keywords)
    assert traced.workload.runs_twice
    assert traced.template(micro_batch).segments


def real(labels: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in labels.items()}


def peak(events: list[int]) -> int:
    """The most that live requests add up to."""
    sizes: list[int] = []
    most = now = 0
    for event in events:
        now += event if event > 0 else -sizes[-event]
        sizes += [event] if event > 0 else []
        most = max(most, now)
    return most
