"""Some mutated mutated headers and configurations: only typed errors. The script runs a hundred thousand."""

import logging
from collections.abc import Iterator

import pytest
from tests.unit.checkpoints.broken import SCRIPT, load_script

fuzz = load_script(SCRIPT.with_name("fuzz_checkpoints.py"))


@pytest.fixture
def _quiet() -> Iterator[None]:
    """transformers warns of what it finds in a configuration; here that is hundreds of lines."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.filterwarnings("ignore")
def test_mutated_files_give_typed_errors_and_nothing_else() -> None:
    report = fuzz.run(range(2_000), seed=1)
    assert report.failures == []
    assert report.outcomes["CheckpointError"] > 1_000
    assert report.outcomes["accepted"] > 100
    assert len(report.messages) > 200


def test_a_case_is_made_again_from_its_number() -> None:
    assert [fuzz.token(fuzz.random.Random("0/7")) for _ in range(3)] == [fuzz.token(fuzz.random.Random("0/7"))] * 3
