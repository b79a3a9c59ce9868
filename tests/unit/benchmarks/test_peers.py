"""Peers: asked as they want to be asked, held against the truth, and shown as they came out."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import peer_predictions
import peers
from peer_predictions import PEERS, Case

CASES = list(peers.cases())


def test_there_is_a_measurement_for_every_case() -> None:
    assert len(CASES) == 223
    assert all(case.allocated_bytes <= case.reserved_bytes for case in CASES)


def test_the_page_is_that_of_the_results() -> None:
    assert peers.PAGE.read_text(encoding="utf-8") == peers.page(*peers.read())


def test_the_kept_answers_of_vramfit_are_those_of_today() -> None:
    lines, _ = peers.read()
    kept = {line["case"]: line["predicted_bytes"] for line in lines if line["peer"] == "vramfit, allocated"}
    assert set(kept) == {case.name for case in CASES}
    case = next(case for case in CASES if case.workload.model == "bert-mini")
    assert peer_predictions.vramfit_allocated(case) == kept[case.name]


def test_vramfit_is_ahead_of_every_peer_in_error_and_in_safety() -> None:
    lines, _ = peers.read()
    found = {peer.name: peers.summarise([n for n in lines if n["peer"] == peer.name]) for peer in PEERS}
    own = found["vramfit, allocated"]
    for peer in PEERS:
        if peer.package != "vramfit" or peer.name == "rule of thumb":
            assert own["median_error"] < found[peer.name]["median_error"]
            assert own["worst_error"] < found[peer.name]["worst_error"]
            assert own["unsafe_share"] < found[peer.name]["unsafe_share"]
    assert found["vramfit, safe bound"]["unsafe_share"] == 0


def case(**changes: object) -> Case:
    workload = replace(CASES[0].workload, model="bert-tiny", **changes)  # type: ignore[arg-type]
    return Case(name="one", workload=workload, model="bert-tiny", allocated_bytes=1, reserved_bytes=1)


def test_accelerate_says_four_times_the_model_for_training_and_nothing_of_a_forward_pass() -> None:
    trained = peer_predictions.accelerate_estimate(case(mode="train"))
    loaded = peer_predictions.accelerate_estimate(case(mode="infer"))
    assert trained == pytest.approx(4 * loaded)
    assert peer_predictions.accelerate_estimate(case(mode="forward")) is None


def test_the_rule_of_thumb_counts_sixteen_bytes_a_parameter_and_activations() -> None:
    few, many = (peer_predictions.rule_of_thumb(case(mode="train", batch=n, micro_batch=n)) for n in (1, 2))
    weights = 2 * few - many  # type: ignore[operator]
    assert weights == 16 * 4_386_178


def test_mem_tracker_follows_two_steps() -> None:
    peak_bytes, seconds = peer_predictions.track(
        case(mode="train", batch=2, micro_batch=2, seq=16).workload, "bert-tiny"
    )
    assert peak_bytes > 4 * 4 * 4_386_178
    assert seconds[0] < seconds[1]


def test_a_peer_that_fails_is_a_finding() -> None:
    def fail(asked: Case) -> int:
        raise RuntimeError("no such thing")

    line = peer_predictions.ask(replace(PEERS[0], predict=fail), CASES[0])
    assert line["error"] == "RuntimeError: no such thing"
    assert peers.summarise([line])["num_failed"] == 1


def test_a_prediction_below_the_truth_is_unsafe() -> None:
    lines = [{"predicted_bytes": size, "true_bytes": 10**9, "seconds": 1.0} for size in (9 * 10**8, 10**9, 11 * 10**8)]
    found = peers.summarise(lines)
    assert found["unsafe_share"] == pytest.approx(1 / 3)
    assert found["worst_error"] == pytest.approx(0.1)
