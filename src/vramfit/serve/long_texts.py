"""Texts far beyond what a model reads, cut before they are tokenized: the tokens that are read stay the same."""

from typing import Any

CHARACTERS_A_TOKEN = 16
"""Texts of so many for each token that is read are looked at; shorter ones are tokenized whole."""
MORE_TOKENS = 64
"""Beyond the length, so that what is cut lies out of sight."""


def beginning(text: str, tokenizer: Any, max_length: int) -> str:
    """As much of a text as decides its first `max_length` tokens: words do not change those before them.

    A text without spaces stays whole.
    """
    size = CHARACTERS_A_TOKEN * max_length
    while len(text) > size:
        part = text[:size].rstrip()
        cut = max(part.rfind(" "), part.rfind("\n"))
        if cut > 0:
            part = part[:cut].rstrip()
            num_tokens = len(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])
            if num_tokens >= max_length + MORE_TOKENS:
                return part
        size *= 2
    return text
