"""A plan is the fastest of what it lists, or the listing says why another was not taken."""

from collections.abc import Sequence
from random import Random

import pytest

from vramfit.planner.plan import plan
from vramfit.planner.recipes import Recipe, strongest
from vramfit.records.plan import Alternative, Plan
from vramfit.settings import KINDS

_draw = Random(0)
LENGTHS = [min(512, max(8, int(_draw.lognormvariate(4.5, 0.7)))) for _ in range(500)]


def faster(made: Plan) -> list[Alternative]:
    """What is listed with less time at full length, fits, and changes no more than the plan does."""
    own_s, own_kind = made.estimate.step_time_s, KINDS.index(strongest(made.workload))
    assert own_s is not None
    return [a for a in made.alternatives if a.fits and a.step_time_s < own_s and KINDS.index(a.kind) <= own_kind]


@pytest.mark.parametrize(
    ("memory", "lengths", "why"),
    [
        ("600MiB", None, "moments in 8 bits must save 1"),  # a tenth less time
        ("2GiB", None, ""),  # nothing is faster
        ("400MiB", LENGTHS, "on the real lengths a step takes"),
        ("1500MiB", LENGTHS, ""),  # passes of 43 fit too, and were taken for short samples though they are slower
    ],
)
def test_what_is_listed_as_faster_says_why_it_is_not_the_plan(
    memory: str, lengths: Sequence[int] | None, why: str
) -> None:
    made = plan("bert-mini", lengths=lengths, gpu="t4", memory=memory, batch=48, seq=512)
    assert [why in a.why_not for a in faster(made)] == [True] * len(faster(made))
    assert bool(faster(made)) == bool(why)
    assert not any(a.why_not for a in made.alternatives if a not in faster(made))


def test_a_recipe_says_what_of_it_has_a_price() -> None:
    recipe = Recipe(precision="amp-fp16", optimizer="adamw-8bit", checkpointing="full")
    assert [each.keyword for each in recipe.priced] == ["checkpointing", "optimizer", "precision"]
    assert recipe.price() == pytest.approx(1.19)
    assert Recipe(precision="fp32", optimizer="adamw-fused").price() == 1.0
