import pytest

from vramfit.records.estimate import PeakMoment, TensorGroup
from vramfit.report.words import (
    group_name,
    job,
    model_name,
    operator_name,
    peak_moment,
    peak_place,
    percent,
    shorten_path,
)
from vramfit.workload import Workload

TRAINING = Workload(model="m")


def moment(**changes: str) -> PeakMoment:
    return PeakMoment(
        **{"phase": "first_step", "part": "optimizer", "module": "", "operator": "_foreach_sqrt", **changes}
    )


def test_of_a_long_path_the_last_parts_are_shown() -> None:
    path = "/home/somebody/projects/classification/experiments/2026-11/models/minilm-tuned-3"
    assert model_name(path) == "…/classification/experiments/2026-11/models/minilm-tuned-3"
    assert model_name("sentence-transformers/all-MiniLM-L6-v2") == "sentence-transformers/all-MiniLM-L6-v2"
    assert model_name("x" * 100) == "x" * 100


def test_shares_are_whole_percents_but_never_nothing_for_something() -> None:
    shares = [percent(part, 1000).replace("\N{NO-BREAK SPACE}", " ") for part in (0, 1, 500, 1000)]
    assert shares == ["0 %", "<1 %", "50 %", "100 %"]


def test_the_optimizer_is_told_without_a_module() -> None:
    assert peak_moment(moment(), TRAINING) == "in the optimizer's step of the first step"
    assert peak_place(moment()) == "Reached by the square roots of AdamW's moments (_foreach_sqrt)."


def test_a_peak_while_loading_belongs_to_no_step() -> None:
    assert peak_moment(moment(phase="load", part="load"), TRAINING) == "while the weights move to the GPU"


def test_an_operator_nobody_named_is_told_as_it_is() -> None:
    assert operator_name("some_new_kernel", "") == "some new kernel"


def test_the_same_operator_means_something_else_in_attention() -> None:
    assert operator_name("bmm", "bert.encoder.layer.0.attention.self") != operator_name("bmm", "head")
    named = operator_name("add", "bert.encoder.layer.0.attention.self")
    assert named == "attention scores, or rotary sums"
    assert operator_name("add", "bert.encoder.layer.0.attention.output") == "sums"


@pytest.mark.parametrize("category", ["weights", "gradients", "optimizer"])
def test_what_a_block_is_for_counts_more_than_what_made_it(category: str) -> None:
    group = TensorGroup(category=category, operator="mm", module="", num_blocks=1, allocated_bytes=1)  # type: ignore[arg-type]
    assert category in group_name(group)


def test_only_settings_that_differ_from_the_defaults_are_told() -> None:
    assert job(TRAINING) == ["batch 8 × 128 tokens", "fp32", "adamw"]
    changed = Workload(model="m", accumulate=2, mask="none", dropout=False, freeze=3, compile=True)
    assert {"in 2 micro-batches of 4", "no mask", "no dropout", "freeze 3 layers", "compile"} <= set(job(changed))


@pytest.mark.parametrize("width", range(1, 50))
def test_a_shortened_path_keeps_its_end(width: int) -> None:
    path = "bert.encoder.layer.*.attention.self"
    short = shorten_path(path, width)
    assert len(short) <= width
    assert path.endswith(short.removeprefix("…"))
