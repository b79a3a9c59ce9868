"""What a head learns as a setting: traced with its own labels and loss, never recorded as graphs."""

from typing import Any

import pytest
import torch
from tests.unit.runtime.small_models import make_batch, make_model

import vramfit
from vramfit.runtime.graphs import PassGraphs
from vramfit.tasks import find_task
from vramfit.tasks.parts.heads import MULTI_LABEL, PROBLEM_TYPES, PROBLEMS, REGRESSION
from vramfit.tasks.parts.losses import head_loss
from vramfit.techniques.application import apply
from vramfit.workload import Workload

JOB: dict[str, Any] = {"model": "bert-tiny", "batch": 8, "seq": 32, "gpu": "h200"}


@pytest.mark.parametrize("problem", [MULTI_LABEL, REGRESSION])
def test_passes_of_labels_and_numbers_are_not_recorded(problem: str) -> None:
    packed = JOB | {"attention": "packed", "precision": "amp-bf16", "optimizer": "adamw-fused", "loop": "stepper"}
    assert Workload(**packed, graphs=True, problem="single").captures_graphs
    with pytest.raises(vramfit.WorkloadError, match=f"graphs are not for problem {problem}"):
        Workload(**packed, graphs=True, problem=problem)
    model = make_model("bert", "sequence-classification", problem_type=PROBLEM_TYPES[problem])
    batch = make_batch("sequence-classification") | {"labels": torch.rand(12, 3)}
    loss = head_loss(model, batch)
    assert not loss.leaves_out
    assert not PassGraphs.takes(batch, loss)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_model_is_traced_with_the_labels_it_will_have(problem: str) -> None:
    model = make_model("bert", "sequence-classification", num_labels=5)
    workload = Workload(**JOB | {"model": "m", "gpu": None}, problem=problem)
    apply(model, workload)
    assert model.config.problem_type == PROBLEM_TYPES[problem]  # type: ignore[union-attr]
    labels = find_task("sequence-classification").meta_labels(model, 8, 32, "cpu")["labels"]
    assert labels.shape == ((8,) if problem == "single" else (8, 5))
    assert labels.is_floating_point() == (problem != "single")


def test_estimates_count_the_head_as_large_as_it_is() -> None:
    small, large = (vramfit.estimate(**JOB, problem=MULTI_LABEL, num_labels=n) for n in (2, 20_000))
    hidden = 128
    assert (
        large.peak_requested_bytes - small.peak_requested_bytes >= 4 * 4 * 19_998 * hidden
    )  # weights, gradients, AdamW
    one = vramfit.estimate(**JOB, problem=REGRESSION, num_labels=1)
    assert one.peak_requested_bytes <= small.peak_requested_bytes


def test_a_plan_for_labels_is_made_without_graphs() -> None:
    plan = vramfit.plan("bert-tiny", batch=8, seq=32, gpu="h200", memory="2GiB", problem=MULTI_LABEL, num_labels=9)
    assert plan.workload.problem == MULTI_LABEL
    assert not plan.workload.captures_graphs


def test_evaluation_knows_it_from_the_folder() -> None:
    with pytest.raises(vramfit.WorkloadError, match="problem is for mode train"):
        Workload(**JOB, problem=REGRESSION, mode="infer")
