"""Texts far beyond what a model reads, cut before they are tokenized: the tokens that are read stay the same."""

from typing import Any

from vramfit.serve.replies import Refused

CHARACTERS_A_TOKEN = 16
"""Texts of so many for each token that is read are looked at; shorter ones are tokenized whole."""
MOST_CHARACTERS_A_TOKEN = 1024
"""A text that has more, as a word of a million letters has, is refused: it would cost far more than is read of it."""
MORE_TOKENS = 64
"""Beyond the length, so that what is cut lies out of sight."""
GROWTH = 4
"""As many times as much is looked at where a part has too few tokens."""


def beginning(text: str, tokenizer: Any, max_length: int) -> str:
    """As much of a text as decides its first `max_length` tokens.

    It ends between two words: those do not change the words before them. A text without spaces, as Chinese is
    written, is cut anywhere, where a cut further on gives the same tokens.

    Raises:
        Refused: a text so long with so few tokens that the end of what is read is not found.
    """
    size, before = CHARACTERS_A_TOKEN * max_length, None
    most = MOST_CHARACTERS_A_TOKEN * max_length
    while len(text) > size:
        if size > most:
            what = f"the first {most:,} of a text's {len(text):,} characters do not settle its {max_length:,} tokens"
            raise Refused(413, what, f"send texts of at most {most:,} characters, or with spaces between words")
        part = text[:size].rstrip()
        cut = max(part.rfind(" "), part.rfind("\n"))
        part = part[:cut].rstrip() if cut > 0 else part
        ids = _ids(part, tokenizer)
        if len(ids) >= max_length + MORE_TOKENS:
            if cut > 0 or ids[:max_length] == before:
                return part
            before = ids[:max_length]
        size *= GROWTH
    return text


def has_more(text: str, tokenizer: Any, num_tokens: int) -> bool:
    """Whether a text has more tokens than that for certain, found without tokenizing all of a very long one."""
    size = 2 * num_tokens
    while len(text) > size:
        if len(_ids(text[:size], tokenizer)) > num_tokens + MORE_TOKENS:
            return True
        size *= GROWTH
    return False


def _ids(text: str, tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
