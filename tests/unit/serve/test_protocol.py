"""Bodies of requests: what each task takes, and a sentence for everything else."""

import json
import math
import random
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.loader.checkpoints import minilm
from transformers import AutoTokenizer

from vramfit.serve.requests import Refused, beginning, has_more, read_body, write_vector
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
        (b'{"inputs": "a", "options": {}}', "'options' is not a known field"),
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
    with suppress(Refused):
        assert read_body(body, "features").references


@pytest.mark.parametrize("task", ["features", "question-answering"])
def test_every_depth_of_nesting_is_refused_in_words(task: Any) -> None:
    for depth in (*range(1, 900, 50), *range(900, 1_100)):  # some that JSON is read at, and Python cannot show
        for opened, closed in (("[", "]"), ('{"text":', "}")):
            body = f'{{"inputs": {opened * depth}1{closed * depth}}}'
            if body != '{"inputs": {"text":1}}':
                said = refused(body.encode(), task)
                assert said["error"]
                assert len(said["error"]) < 1_000  # not the nesting itself


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_every_fp32_number_is_read_back_as_it_was(numbers: list[float]) -> None:
    import torch

    read = json.loads(write_vector(numbers))
    assert list(read) == ["embedding"]
    expected = torch.tensor(numbers, dtype=torch.float32)
    assert torch.equal(torch.tensor(read["embedding"], dtype=torch.float32), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_number_for_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="no numbers"):
        write_vector([0.5, bad])


WORDS = ("the", "unbelievably", "naïve", "Straße", "x", "1,234.5", "don't", "日本", "…", "antidisestablishment", "?!")


@pytest.mark.parametrize("max_length", [16, 128])
@pytest.mark.parametrize("seed", range(5))
def test_the_tokens_that_are_read_stay_the_same(max_length: int, seed: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(minilm()))
    draw = random.Random(seed)
    text = draw.choice(["", " ", "\n"]) + draw.choice([" ", "  ", "\n"]).join(draw.choices(WORDS, k=4_000))
    part = beginning(text, tokenizer, max_length)
    assert len(part) < len(text) / 3

    def read(one: str) -> list[int]:
        ids: list[int] = tokenizer(one, truncation=True, max_length=max_length)["input_ids"]
        return ids

    assert read(part) == read(text)


def test_what_has_few_tokens_stays_whole() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(minilm()))
    for text in ("a" * 50_000, "short", " " * 50_000):
        assert beginning(text, tokenizer, 64) == text


@pytest.mark.parametrize("text", ["日本語を読む" * 20_000, "." * 60_000, "naïve…" * 20_000, "漢a1" * 20_000])
@pytest.mark.parametrize("max_length", [16, 128])
def test_a_text_without_spaces_is_cut_too(text: str, max_length: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(minilm()))
    part = beginning(text, tokenizer, max_length)
    assert len(part) <= 64 * max_length
    read = [tokenizer(one, truncation=True, max_length=max_length)["input_ids"] for one in (part, text)]
    assert read[0] == read[1]


def test_a_cut_that_would_change_a_token_is_not_taken() -> None:
    """Of a tokenizer that reads from the end, no beginning says what the whole is."""

    class Backwards:
        def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
            return {"input_ids": [len(text) - place for place in range(len(text))]}

    text = "x" * 5_000
    assert beginning(text, Backwards(), 16) == text


@pytest.mark.parametrize(
    ("text", "more"), [("a " * 5_000, True), ("." * 5_000, True), ("a" * 50_000, False), ("a " * 990, False)]
)
def test_more_tokens_than_allowed_are_seen_in_a_part(text: str, more: bool) -> None:
    assert has_more(text, AutoTokenizer.from_pretrained(str(minilm())), 1_000) is more
