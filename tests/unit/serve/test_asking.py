"""Bodies of requests: what each task takes, and a sentence for everything else."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.serve.asking import read_body
from vramfit.serve.replies import Refused
from vramfit.tasks import all_tasks

FORMS = {task.name: task.request_forms for task in all_tasks() if task.is_served}


def refused(body: bytes, task: Any = "sequence-classification") -> dict[str, str]:
    with pytest.raises(Refused) as caught:
        read_body(body, task)
    assert caught.value.reply.status == 400
    said: dict[str, str] = json.loads(caught.value.reply.body)
    return said


@pytest.mark.parametrize("task", FORMS)
def test_every_form_that_a_hint_shows_is_taken(task: Any) -> None:
    for form in FORMS[task]:
        for body in (f'{{"inputs": {form}}}', f'{{"instances": [{form}, {form}]}}'):
            asked = read_body(body.encode(), task)
            assert len(asked.references) == (2 if asked.is_list else 1)


def test_one_input_wants_one_answer_and_a_list_a_list() -> None:
    assert read_body(b'{"inputs": "a"}', "features").is_list is False
    assert read_body(b'{"inputs": ["a"]}', "features").is_list is True


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b'{"inputs": ', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'"text"', "a text without inputs or instances"),
        (b"[1]", "a list without"),
        (b"17", "a number without"),
        (b"{}", "an object without"),
        (b'{"inputs": []}', "an empty list"),
        (b'{"inputs": ""}', "text is empty"),
        (b'{"inputs": " \\n"}', "text is empty"),
        (b'{"inputs": null}', "None is no input"),
        (b'{"inputs": ["a", ["b"]]}', "inputs[1]: ['b'] is no input"),
        (b'{"inputs": {"txt": "a"}}', "'txt' is not known"),
        (b'{"inputs": {}}', "no text"),
        (b'{"inputs": "a", "options": {}}', "'options' is not known"),
        (b'{"inputs": "a", "parameters": [3]}', "parameters is a list, not an object"),
        (b'{"inputs": "a", "parameters": {"topk": 3}}', "parameters: 'topk' is not known"),
        (b'{"inputs": "a", "parameters": {"top_k": 0}}', "top_k 0 is not a whole number from 1"),
        (b'{"inputs": "a", "parameters": {"top_k": true}}', "top_k True is not a whole number"),
        (b'{"inputs": "a", "parameters": {"top_k": 1e9}}', "is not a whole number"),
        (b'{"inputs": "a", "parameters": {"top_k": 5000}}', "top_k 5000 is more than the 1,000 scores"),
        (b'{"inputs": "\\ud800"}', "surrogate"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(body: bytes, words: str) -> None:
    said = refused(body)
    assert words in said["error"]
    assert '"inputs"' in said["hint"]


def test_the_number_of_scores_comes_beside_the_inputs() -> None:
    asked = read_body(b'{"instances": ["a", "b"], "parameters": {"top_k": 3}}', "sequence-classification")
    assert (asked.top_k, len(asked.references)) == (3, 2)
    for body in (
        b'{"inputs": "a"}',
        b'{"inputs": "a", "parameters": {}}',
        b'{"inputs": "a", "parameters": {"top_k": null}}',
    ):
        assert read_body(body, "sequence-classification").top_k is None
    said = refused(b'{"inputs": "a", "parameters": {"top_k": 3}}', "features")
    assert "top_k is not for features" in said["error"]
    assert "top_k" not in said["hint"]


def test_a_question_needs_its_context() -> None:
    assert "context" in refused(b'{"inputs": {"question": "who"}}', "question-answering")["error"]
    assert "is no input of question-answering" in refused(b'{"inputs": "who"}', "question-answering")["error"]


KEYS = st.sampled_from(["inputs", "instances", "text", "text_pair", "tokens", "question", "context", "x"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))


@given(VALUES, st.sampled_from(sorted(FORMS)))
def test_any_json_is_understood_or_refused(value: Any, task: Any) -> None:
    for body in (json.dumps(value), json.dumps({"inputs": value})):
        with suppress(Refused):
            assert read_body(body.encode(), task).references


@given(st.binary(max_size=40))
def test_any_bytes_are_understood_or_refused(body: bytes) -> None:
    with pytest.raises(Refused):
        read_body(body, "features")


@pytest.mark.parametrize("task", ["features", "question-answering"])
def test_every_depth_of_nesting_is_refused_in_words(task: Any) -> None:
    for depth in (*range(1, 900, 50), *range(900, 1_100)):  # some that JSON is read at, and Python cannot show
        for opened, closed in (("[", "]"), ('{"text":', "}")):
            body = f'{{"inputs": {opened * depth}1{closed * depth}}}'
            if body != '{"inputs": {"text":1}}':
                refused(body.encode(), task)
