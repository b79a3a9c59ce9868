"""Long texts are cut before they are tokenized, and nothing that a model reads changes."""

import random

import pytest
from tests.unit.loader.checkpoints import minilm
from transformers import AutoTokenizer

from vramfit.serve.long_texts import beginning, has_more

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
