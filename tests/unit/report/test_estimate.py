import pytest
from tests.unit.report.samples import ADVICE, drawn, estimate

from vramfit.records.estimate import PeakMoment
from vramfit.report.estimate import Sized, render_estimate, render_verdict
from vramfit.report.words import verdict_of
from vramfit.units import MIB

NOTE = "torch 2.11 has no kernels for sm_37, so this GPU can be predicted for but nothing can be run on it here"


def test_a_job_that_fits_says_so_with_what_is_left() -> None:
    text = drawn(render_estimate(estimate()))
    assert "✓ Fits, with 3.80 GiB to spare." in text
    assert "At most 6.83 GiB reserved of 10.64 GiB (k80: 11.17 GiB, CUDA takes ≤ 550 MiB)" in text


def test_a_job_that_does_not_fit_says_by_how_much() -> None:
    text = drawn(render_estimate(estimate(batch=16)))
    assert "✗ Does not fit: 1.21 GiB too much." in text
    assert "┃" in text


def test_fragmentation_alone_can_be_the_reason() -> None:
    assert "too fragmented" in drawn(render_estimate(estimate(fits=False)))


def test_without_a_capacity_the_verdict_is_left_open() -> None:
    text = drawn(render_estimate(estimate(gpu=None)))
    assert "left open" in text
    assert "sm_80" in text


def test_a_fit_that_needs_retries_is_called_tight() -> None:
    assert "empty its cache 2 times" in drawn(render_estimate(estimate(num_retries=2)))


def test_a_fit_that_needs_a_warm_process_says_how_to_warm_it() -> None:
    assert "run one small matrix product" in " ".join(drawn(render_estimate(estimate(fits_cold=False))).split())
    assert "small matrix product" not in drawn(render_estimate(estimate(batch=64, fits_cold=False)))


VERDICTS: dict[str, dict[str, object]] = {
    "fits": {},
    "too much": {"batch": 16},
    "fragmented": {"fits": False},
    "open": {"gpu": None},
    "one retry": {"num_retries": 1},
    "retries and cold": {"num_retries": 2, "fits_cold": False},
    "cold": {"fits_cold": False},
    "memory given": {"memory": 8 * 1024 * MIB},
    "host memory": {"offload": "optimizer", "loop": "stepper", "host_bytes": 2 * MIB},
    "too much for the host": {
        "offload": "optimizer",
        "loop": "stepper",
        "host_memory": MIB,
        "host_bytes": 128 * MIB,
        "fits": False,
    },
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_terminal_says_what_every_other_verdict_says(case: str) -> None:
    made = estimate(**VERDICTS[case])
    verdict = verdict_of(made)
    shown = drawn(Sized([render_verdict(made)]), 160)
    lines = [line.lstrip("✓✗·! ").rstrip() for line in shown.splitlines()]
    hint = ["--gpu or --memory would tell."] if verdict.tone == "open" else []
    assert lines == [f"{verdict.headline}.", *verdict.details, *hint]


def test_too_little_host_memory_is_the_reason_wherever_it_is_told() -> None:
    made = estimate(**VERDICTS["too much for the host"])
    assert verdict_of(made).headline == "Does not fit: 127.00 MiB too much for the host's memory"
    assert "127.00 MiB too much for the host's memory" in repr(made)


def test_the_four_numbers_stand_against_the_size_of_the_gpu() -> None:
    lines = drawn(render_estimate(estimate()), 120).splitlines()
    rows = {line.split()[0]: line for line in lines if line.split()[:1]}
    assert [name for name in ("requested", "allocated", "reserved", "process") if "▆" in rows[name]] == [
        "requested",
        "allocated",
        "reserved",
        "process",
    ]
    assert "60" in rows["allocated"]
    assert f"{estimate().peak_allocated_bytes:,} B" in rows["allocated"]


def test_with_memory_given_the_context_is_outside_of_it() -> None:
    e = estimate(memory=8 * 1024 * MIB, batch=8)
    (process,) = (line for line in drawn(render_estimate(e)).splitlines() if line.startswith("process"))
    assert "%" not in process


def test_every_category_in_memory_has_its_size_and_share() -> None:
    text = drawn(render_estimate(estimate()))
    for category in ("weights", "gradients", "optimizer", "activations", "temporaries", "workspaces", "inputs"):
        assert category in text
    assert "weights      418.00 MiB   6 %" in text


def test_the_moment_of_the_peak_is_told_in_words_and_by_name() -> None:
    text = " ".join(drawn(render_estimate(estimate())).split())
    assert "in the backward pass of a steady step" in text
    assert "gradient of the attention scores (_softmax_backward_data) in bert.encoder.layer.11.attention.self" in text


def test_inference_speaks_of_batches_not_steps() -> None:
    peak = PeakMoment(phase="first_step", part="forward", module="bert", operator="gelu")
    text = drawn(render_estimate(estimate(mode="infer", peak=peak)))
    assert "in the forward pass of the first batch" in text
    assert "later batches" in text
    assert "steady" not in text


def test_the_largest_groups_name_what_they_are_and_where() -> None:
    text = drawn(render_estimate(estimate()), 120)
    assert "attention probabilities    bert.encoder.layer.*.attention.self" in text
    assert text.index("attention dropout, masks") < text.index("attention probabilities")


def test_advice_is_grouped_by_what_it_costs_and_says_what_is_left() -> None:
    text = drawn(render_estimate(estimate(batch=16), ADVICE))
    assert "attention sdpa      saves   2.00 GiB in backward  →   7.00 GiB  ✓ fits" in text
    assert "freeze embeddings   saves 356.00 MiB in backward  →   9.00 GiB  ✗ too much" in text
    assert text.index("The same maths") < text.index("another precision") < text.index("Different training")


def test_a_change_that_saves_nothing_is_not_advised() -> None:
    assert "adamw-fused" not in drawn(render_estimate(estimate(), ADVICE))
    assert "No single change" in drawn(render_estimate(estimate(), ADVICE[3:]))


def test_advice_can_be_left_out() -> None:
    assert "change" not in drawn(render_estimate(estimate(), None))


def test_notes_and_basis_close_the_report() -> None:
    text = drawn(render_estimate(estimate(notes=(NOTE,))))
    assert "! torch 2.11" in text
    assert "Derived: " in text
    assert "Verified: " in drawn(render_estimate(estimate(basis="verified")))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": 64},
        {"gpu": None, "groups": (), "timeline": ()},
        {"model": "an/" + "extremely-long-name-" * 8, "accumulate": 4, "max_grad_norm": 1.0, "checkpointing": 6},
        {"freeze": ["bert.encoder.layer.*", "bert.embeddings.*"], "notes": (NOTE, NOTE)},
    ],
)
def test_no_line_is_wider_than_the_terminal(width: int, changes: dict[str, object]) -> None:
    lines = drawn(render_estimate(estimate(**changes), ADVICE), width).splitlines()
    assert max(map(len, lines)) <= min(width, 120)


def test_a_model_name_with_markup_is_shown_as_it_is() -> None:
    assert "[bold]model" in drawn(render_estimate(estimate(model="[bold]model")))


def test_the_step_time_is_one_line_with_its_basis() -> None:
    busy = {"matrix products": 0.03, "elementwise": 0.011, "host": 0.025}
    text = drawn(render_estimate(estimate(step_time_s=0.0423, time_basis="catalogue", time_breakdown=busy)), 100)
    assert "Step time  about 42.3 ms a step (GPU busy 41 ms, host 25 ms) · catalogue rates" in text
    calibrated = drawn(render_estimate(estimate(step_time_s=1.234, time_basis="calibrated")), 100)
    assert "about 1.23 s a step · calibrated" in calibrated


def test_without_a_step_time_nothing_is_said_of_it() -> None:
    assert "Step time" not in drawn(render_estimate(estimate()))
