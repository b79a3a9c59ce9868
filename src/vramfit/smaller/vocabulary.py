"""A tokenizer with fewer tokens: `tokenizer.json` edited so that the texts of a corpus are segmented as before.

Why the segmentation stays the same, for each kind of model:

- WordPiece takes the longest token that matches. The tokens that a corpus uses stay, and a removed one never matched.
- BPE applies the merge of the lowest rank first. All merges that lead to a kept token stay, in their order, so the
  merge that was applied before is still the first one.
- Unigram takes the segmentation with the best score. The scores stay, the best segmentation stays, and others only
  disappear. The token with the lowest score stays too, because it decides what an unknown character costs.

Exceptions exist (a word with an unknown character, equal scores): `trim.py` compares every row of the corpus and keeps
more tokens where one differs.
"""

import json
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vramfit.errors import CheckpointError

KINDS = ("WordPiece", "WordLevel", "BPE", "Unigram")
"""Models of the tokenizers library that can be trimmed."""
LONGEST_PIECE = 10_000
"""Characters of a word whose parts are looked up, at most."""


@dataclass(frozen=True)
class Vocabulary:
    """The content of a `tokenizer.json`.

    Raises:
        CheckpointError: a model that cannot be trimmed.
    """

    data: Mapping[str, Any]

    def __post_init__(self) -> None:
        kind = self.model.get("type")
        if kind not in KINDS:
            raise CheckpointError(
                f"the tokenizer has a model of type {kind}; vramfit trims {', '.join(KINDS)}",
                hint="save the tokenizer again with a current release of transformers, which names the type",
            )

    @property
    def model(self) -> Mapping[str, Any]:
        """The part that segments words."""
        model: Mapping[str, Any] = self.data["model"]
        return model

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token → its id, of the model alone."""
        if self.model["type"] == "Unigram":
            return {token: i for i, (token, _) in enumerate(self.model["vocab"])}
        return dict(self.model["vocab"])

    @cached_property
    def added(self) -> dict[str, int]:
        """Token → its id, of those that are found before the model is asked: special tokens above all."""
        return {token["content"]: token["id"] for token in self.data.get("added_tokens") or ()}

    @cached_property
    def names(self) -> dict[int, str]:
        """Id → token, of all."""
        return {i: token for token, i in (self.ids | self.added).items()}

    def needed(self, used: Iterable[int]) -> set[int]:
        """The ids to keep where a corpus uses some: those, all special tokens, bytes and characters, and what the
        model needs to find the same tokens again."""
        kept = {i for i in used if i in self.names} | set(self.added.values())
        unknown = self.model.get("unk_token") or self.model.get("unk_id")
        kept |= {self.ids.get(unknown, -1) if isinstance(unknown, str) else unknown} if unknown is not None else set()
        characters = {c for i in kept for c in self.names.get(i, "")} | set(string.printable)
        kept |= self._having(characters) | self._bytes()
        if self.model["type"] == "Unigram":
            kept.add(min(range(len(self.model["vocab"])), key=lambda i: self.model["vocab"][i][1]))
        if self.model["type"] == "BPE":
            kept |= self._merged_from(kept)
        return kept & set(self.names)

    def parts_of(self, words: Iterable[str]) -> set[int]:
        """The ids of all tokens that are a part of a word: with them it is segmented as by the whole vocabulary."""
        longest = max(map(len, self.ids))
        cuts = {
            word[begin : begin + length]
            for word in words
            for begin in range(min(len(word), LONGEST_PIECE))
            for length in range(1, longest + 1)
        }
        found = self._having(cuts)
        return found | (self._merged_from(found) if self.model["type"] == "BPE" else set())

    def trimmed(self, kept: Iterable[int], pad_id: int | None = None) -> "Trimmed":
        """The same without all other tokens.

        Args:
            pad_id: of the token for padding. It keeps its number where it can: RoBERTa counts positions from it.
        """
        order = sorted(kept)
        if pad_id in order and pad_id < len(order):
            order.remove(pad_id)
            order.insert(pad_id, pad_id)
        new = {old: i for i, old in enumerate(order)}
        data = json.loads(json.dumps(self.data))
        model = data["model"]
        if model["type"] == "Unigram":
            model["vocab"] = [model["vocab"][old] for old in order if old < len(model["vocab"])]
            model["unk_id"] = new.get(model.get("unk_id"))
        else:
            places = {token: new[old] for token, old in self.ids.items() if old in new}
            model["vocab"] = dict(sorted(places.items(), key=lambda item: item[1]))
        if model["type"] == "BPE":
            model["merges"] = [m for m in model["merges"] if all(t in model["vocab"] for t in self._pair(m))]
        data["added_tokens"] = sorted(
            (token | {"id": new[token["id"]]} for token in data.get("added_tokens") or ()), key=lambda t: t["id"]
        )
        data["truncation"] = data["padding"] = None
        _renumber(data.get("post_processor"), new)
        return Trimmed(data, tuple(order))

    def _having(self, texts: set[str]) -> set[int]:
        """The ids of tokens that are one of these texts, at the beginning, inside or at the end of a word."""
        before = self.model.get("continuing_subword_prefix") or ""
        after = self.model.get("end_of_word_suffix") or ""
        forms = {form for text in texts for form in (text, f"{before}{text}", f"{text}{after}", f"▁{text}")}
        return {self.ids[form] for form in forms if form in self.ids}

    def _bytes(self) -> set[int]:
        """The ids of tokens that stand for single bytes."""
        from tokenizers.pre_tokenizers import ByteLevel

        alphabet = {f"<0x{byte:02X}>" for byte in range(256)}
        parts = (self.data.get(name) for name in ("pre_tokenizer", "normalizer", "decoder"))
        if any('"ByteLevel"' in json.dumps(part) for part in parts):
            alphabet |= set(ByteLevel.alphabet())
        return {self.ids[token] for token in alphabet if token in self.ids}

    def _merged_from(self, kept: set[int]) -> set[int]:
        """The ids of all tokens that merges make the kept ones of."""
        parts: dict[int, list[int]] = {}
        for merge in self.model["merges"]:
            left, right, made = (self.ids[token] for token in self._pair(merge))
            parts.setdefault(made, []).extend((left, right))
        found, waiting = set(kept), list(kept)
        while waiting:
            fresh = set(parts.get(waiting.pop(), ())) - found
            found |= fresh
            waiting += fresh
        return found

    def _pair(self, merge: Any) -> tuple[str, str, str]:
        """What a merge joins, and what it makes."""
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        before = self.model.get("continuing_subword_prefix") or ""
        return left, right, left + right.removeprefix(before)


@dataclass(frozen=True, slots=True)
class Trimmed:
    """A vocabulary with fewer tokens."""

    data: dict[str, Any]
    """For a `tokenizer.json`."""
    kept: tuple[int, ...]
    """New id → old id."""

    @property
    def new_ids(self) -> dict[int, int]:
        """Old id → new id."""
        return {old: new for new, old in enumerate(self.kept)}


def _renumber(part: Any, new: Mapping[int, int]) -> None:
    """Give the tokens that a post-processor puts around a text their new numbers."""
    if not isinstance(part, dict):
        return
    for name in ("sep", "cls"):
        if isinstance(part.get(name), list):
            part[name][1] = new[part[name][1]]
    if isinstance(part.get("special_tokens"), dict):
        for token in part["special_tokens"].values():
            token["ids"] = [new[i] for i in token["ids"]]
    for inner in part.get("processors") or ():
        _renumber(inner, new)
