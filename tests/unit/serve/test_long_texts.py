"""Long texts are cut before they are tokenized, and nothing that a model reads changes."""

import random

import pytest
from tests.unit.loader.checkpoints import minilm
from transformers import AutoTokenizer

from vramfit.serve.long_texts import beginning

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


def test_what_cannot_be_cut_between_words_stays_whole() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(minilm()))
    for text in ("a" * 50_000, "short", " " * 50_000, "日本" * 20_000):
        assert beginning(text, tokenizer, 64) == text
