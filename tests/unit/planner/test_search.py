"""The space and the search: splits, orders, prices, and that bounds leave out nothing that is better."""

from dataclasses import replace
from itertools import pairwise

from vramfit.estimator.traced import collection_paused
from vramfit.planner.bench import Bench
from vramfit.planner.request import Request
from vramfit.planner.search import Search
from vramfit.planner.space import micro_batches, recipes, trainings, with_layers

REQUEST = Request.of({"batch": 12, "seq": 64, "gpu": "t4", "memory": "400MiB"})


def test_splits_are_the_smallest_for_each_number_of_passes() -> None:
    assert micro_batches(REQUEST, 32) == [32, 16, 11, 8, 7, 6, 5, 4, 3, 2, 1]
    assert micro_batches(replace(REQUEST, fixed={"micro_batch": 12}), 32) == [12]
    assert micro_batches(replace(REQUEST, fixed={"accumulate": 5}), 32) == [7]


def test_of_very_many_splits_those_that_differ_are_tried() -> None:
    many = micro_batches(REQUEST, 10**8)
    assert len(many) < 500
    assert many[0] == 10**8
    assert many[-64:] == list(range(64, 0, -1))
    assert all(0.9 * before < after < before for before, after in pairwise(m for m in many if m < 10**6) if after > 64)


def test_trainings_need_to_be_allowed_and_go_from_mild_to_strong() -> None:
    assert [t.words for t in trainings(REQUEST, 12)] == [""]
    allowed = replace(REQUEST, allow=frozenset(["freeze", "lora", "int8"]))
    assert [t.words for t in trainings(allowed, 12)][:3] == ["", "freeze embeddings", "lora 16"]
    fixed = replace(allowed, fixed={**REQUEST.fixed, "freeze": "embeddings"})
    assert all("freeze" not in t.settings for t in trainings(fixed, 12))


def test_what_a_gpu_lacks_is_not_in_the_space() -> None:
    with collection_paused():
        old = Bench("bert-tiny", replace(REQUEST, fixed={**REQUEST.fixed, "gpu": "gtx-1060"}))
        training = next(trainings(REQUEST, 2))
        made = recipes(REQUEST, training, old.base, (6, 1))
    assert {r.precision for r in made} == {"amp-fp16", "fp32"}
    assert {r.optimizer for r in made} == {"adamw-fused"}  # no Triton for it


def test_the_first_that_fits_is_the_best_of_all_by_brute_force() -> None:
    with collection_paused():
        everything = Bench("bert-mini", REQUEST)  # what settings take does not depend on what there is
        for memory in ("130MiB", "170MiB", "230MiB"):
            request = replace(REQUEST, fixed={**REQUEST.fixed, "memory": memory})
            bench = Bench("bert-mini", request)
            limit = bench.budget_bytes
            made = recipes(request, next(trainings(request, bench.num_layers)), bench.base, (7, 5))
            found = Search(bench, made, limit).run()
            every = [
                (everything.step_time(r, m) * r.price, r, m)
                for recipe in made
                for k in range(bench.num_layers + 1)
                for r in [with_layers(recipe, k, bench.num_layers)]
                for m in micro_batches(request, bench.batch)
                if everything.safe_bytes(r, m) <= limit
            ]
            if found is None:
                assert not every
            else:
                assert found.step_time_s * found.recipe.price <= 1.02 * min(time for time, _, _ in every)
