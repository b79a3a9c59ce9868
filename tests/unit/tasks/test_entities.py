"""Entities as seqeval finds them, by cases worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.tasks.token_classification import EntityCounts, are_spans, entities

CASES = {
    "O O": [],
    "B-per I-per O B-loc": [("per", 0, 1), ("loc", 3, 3)],
    "B-per B-per": [("per", 0, 0), ("per", 1, 1)],
    "I-per I-per": [("per", 0, 1)],
    "B-per I-loc": [("per", 0, 0), ("loc", 1, 1)],
    "O I-per O": [("per", 1, 1)],
    "B-creative-work I-creative-work": [("creative-work", 0, 1)],
    "B-per E-per S-per": [("per", 0, 1), ("per", 2, 2)],
    "B-per O I-per": [("per", 0, 0), ("per", 2, 2)],
    "I-per B-per I-per": [("per", 0, 0), ("per", 1, 2)],
}


@pytest.mark.parametrize("tags", CASES)
def test_entities_of_a_sentence(tags: str) -> None:
    assert entities(tags.split()) == CASES[tags]


def test_scores_count_exact_spans_of_the_right_type() -> None:
    counts = EntityCounts()
    # of two entities one is found exactly, and one with a wrong border
    true = ["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"]
    counts.add(true, ["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"])
    counts.add(["B-PER", "I-PER", "O"], ["B-PER", "I-PER", "O"])
    assert counts.scores() == {"precision": 0.5, "recall": 0.5, "f1": 0.5}
    assert (counts.num_words_right, counts.num_words) == (8, 10)


def test_nothing_found_is_zero_and_not_an_error() -> None:
    counts = EntityCounts()
    counts.add(["O", "O"], ["O", "O"])
    assert counts.scores() == {"precision": 0.0, "recall": 0.0, "f1": 0.0}


def test_parts_of_speech_are_no_spans() -> None:
    assert are_spans(["O", "B-x"])
    assert are_spans(["O", "B", "I"])
    assert not are_spans(["NOUN", "VERB"])


@given(st.lists(st.sampled_from(["O", "B-a", "I-a", "B-b", "I-b"]), max_size=30))
def test_entities_cover_exactly_the_words_with_tags(tags: list[str]) -> None:
    covered = [place for _, begin, end in entities(tags) for place in range(begin, end + 1)]
    assert covered == [place for place, tag in enumerate(tags) if tag != "O"]
    assert all({tags[i][2:] for i in range(begin, end + 1)} == {kind} for kind, begin, end in entities(tags))
