"""Tensors of a checkpoint matched with those of a model, by the renaming rules of transformers and a few more.

transformers renames old names, adds or takes off the base model's prefix, and treats tied weights as one; the
result is the same. It does not know prefixes that wrappers leave (`module.` of DataParallel): these are removed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vramfit.checkpoints.files import CheckpointFiles
from vramfit.checkpoints.safetensors_file import TensorEntry
from vramfit.models import ResolvedModel, backbone, head_parameters
from vramfit.tasks import all_tasks

if TYPE_CHECKING:
    import torch
    from torch import nn

WRAPPERS = ("module.", "_orig_mod.", "0.auto_model.", "auto_model.", "model.", "encoder.", "net.", "backbone.")
"""Prefixes that other code puts before all names: DataParallel, torch.compile, sentence-transformers, Lightning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeMismatch:
    """A tensor that the checkpoint has in another shape than the model."""

    name: str
    """The model's name of it."""
    entry: TensorEntry
    """The tensor in the checkpoint."""
    expected: tuple[int, ...]
    """The model's shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Matching:
    """Which tensors of a checkpoint go where in a model."""

    targets: Mapping[str, str]
    """Checkpoint name → model name, for tensors that fit."""
    missing: tuple[str, ...]
    """Model names that nothing is there for, as transformers counts them (tied ones are there if one is)."""
    unexpected: tuple[str, ...]
    """Checkpoint names that have no place."""
    mismatched: tuple[ShapeMismatch, ...]
    """Tensors with a place but another shape."""
    converted: tuple[str, ...]
    """Checkpoint names that transformers splits or joins."""
    collisions: tuple[tuple[str, str], ...]
    """Pairs of checkpoint names that mean one place."""
    wrapper: str
    """The prefix that was taken off, or nothing."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One checkpoint under inspection."""

    resolved: ResolvedModel
    """The configuration and the class of the task."""
    config_data: Mapping[str, Any]
    """The same configuration as it stands in the file."""
    model: "nn.Module"
    """The model on the meta device."""
    files: CheckpointFiles
    """The weight files."""
    entries: Sequence[TensorEntry]
    """Their tensors."""
    matching: Matching
    """Where the tensors go."""
    num_labels_asked: int | None = None
    """The head size that was asked for, where one was."""

    @cached_property
    def state(self) -> "Mapping[str, torch.Tensor]":
        """The model's tensors by name; tied ones are one object."""
        return self.model.state_dict(keep_vars=True)

    @cached_property
    def head(self) -> frozenset[str]:
        """Names outside the backbone, tied ones included."""
        inside = {id(tensor) for tensor in backbone(self.model).state_dict(keep_vars=True).values()}
        outside = {name for name, tensor in self.state.items() if id(tensor) not in inside}
        return frozenset(outside | set(head_parameters(self.model)))

    @cached_property
    def buffers(self) -> frozenset[str]:
        """Names of tensors that are computed, not learned."""
        return frozenset(name for name, _ in self.model.named_buffers())

    @cached_property
    def class_name(self) -> str:
        """The transformers class that the task needs."""
        return self.resolved.model_class.__name__

    @cached_property
    def saved_architectures(self) -> tuple[str, ...]:
        """The classes that the configuration says the checkpoint was saved from."""
        named = self.config_data.get("architectures")
        return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()


def without_other_head(subject: Subject) -> Matching:
    """The matching; a head that another task's class has saved under the names of this one's is not this task's."""
    endings = {task.auto_class.removeprefix("AutoModel") for task in all_tasks() if task.shares_head_names}
    own = {ending for ending in endings if subject.class_name.endswith(ending)}
    saved = {ending for ending in endings for name in subject.saved_architectures if name.endswith(ending)}
    found, head = subject.matching, subject.head - subject.buffers
    if not own or not saved or own & saved:
        return found
    theirs = {old: new for old, new in found.targets.items() if new in head}
    theirs |= {each.entry.name: each.name for each in found.mismatched if each.name in head}
    return replace(
        found,
        targets={old: new for old, new in found.targets.items() if old not in theirs},
        mismatched=tuple(each for each in found.mismatched if each.entry.name not in theirs),
        missing=(*found.missing, *theirs.values()),
        unexpected=(*found.unexpected, *theirs),
    )


def match(entries: Sequence[TensorEntry], model: "nn.Module") -> Matching:
    """Match the tensors of a checkpoint with a model on the meta device."""
    rules = _Rules(model)
    wrapper = _find_wrapper([entry.name for entry in entries], rules)
    shapes = rules.shapes
    taken: dict[str, str] = {}
    present: set[str] = set()
    targets, unexpected, mismatched, converted, collisions = {}, [], [], [], []
    for entry in entries:
        names, is_converted = rules.places(entry.name.removeprefix(wrapper))
        if not names:
            unexpected.append(entry.name)
        elif is_converted:
            converted.append(entry.name)
            present.update(names)
        elif names[0] in taken:
            collisions.append((taken[names[0]], entry.name))
        else:
            taken[names[0]] = entry.name
            present.add(names[0])
            if entry.shape == shapes[names[0]]:
                targets[entry.name] = names[0]
            else:
                mismatched.append(ShapeMismatch(name=names[0], entry=entry, expected=shapes[names[0]]))
    return Matching(
        targets=targets,
        missing=tuple(rules.missing(present)),
        unexpected=tuple(name for name in unexpected if not rules.ignores(name.removeprefix(wrapper))),
        mismatched=tuple(mismatched),
        converted=tuple(converted),
        collisions=tuple(collisions),
        wrapper=wrapper,
    )


def _find_wrapper(names: Sequence[str], rules: "_Rules") -> str:
    """The prefix, of up to three wrappers, whose removal matches most names; usually there is none."""
    best, prefix = rules.num_known(names), ""
    for _ in range(3):
        longer = {f"{prefix}{w}": rules.num_known(_without(names, f"{prefix}{w}")) for w in WRAPPERS}
        winner = max(longer, key=lambda candidate: longer[candidate])
        if longer[winner] > best:
            best, prefix = longer[winner], winner
            continue
        # `module.model.`: one wrapper off may show nothing yet where most names carry it
        shared = [p for p in longer if names and sum(n.startswith(p) for n in names) > 0.9 * len(names)]
        if best > 0 or not shared:
            break
        prefix = shared[0]
    return prefix if best > rules.num_known(names) else ""


def _without(names: Iterable[str], prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


class _Rules:
    """What transformers does to names while it loads this model."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._state = model.state_dict()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._state.items()}
        self._base_prefix = getattr(model, "base_model_prefix", "") or None
        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        self._may_miss = _any_of(getattr(model, "_keys_to_ignore_on_load_missing", None))
        dropped = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        # buffers that older versions saved; as `_adjust_missing_and_unexpected_keys` of transformers 5 does
        dropped |= {r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
        self._may_drop = _any_of(dropped)

    def places(self, name: str) -> tuple[list[str], bool]:
        """Model names that a checkpoint's tensor fills, and whether it is split or joined on the way."""
        from transformers.core_model_loading import rename_source_key

        renamed, pattern = rename_source_key(name, self._renamings, self._converters, self._base_prefix, self._state)
        if renamed not in self._state and name in self._state:
            renamed, pattern = name, None
        if pattern is None:
            return ([renamed] if renamed in self._state else []), False
        converter = next(c for c in self._converters if pattern in c.source_patterns)
        first, *_ = converter.target_patterns
        found = [renamed.replace(first, target) for target in converter.target_patterns]
        return [place for place in found if place in self._state], True

    def num_known(self, names: Sequence[str]) -> int:
        """How many of these names have a place."""
        return sum(bool(self.places(name)[0]) for name in names)

    def missing(self, present: set[str]) -> list[str]:
        """Model names without a tensor; tied ones are there if any of them is."""
        groups: dict[str, set[str]] = {}
        for target, source in self._tied.items():
            groups.setdefault(source, {source}).add(target)
        there = set(present)
        for group in groups.values():
            if group & present:
                there |= group
        absent = [name for name in self.shapes if name not in there]
        return [name for name in absent if self._may_miss is None or not self._may_miss.search(name)]

    def ignores(self, name: str) -> bool:
        """Whether transformers ignores this name."""
        return self._may_drop is not None and self._may_drop.search(name) is not None


def _any_of(patterns: "Iterable[str] | None") -> "re.Pattern[str] | None":
    parts = [f"({pattern})" for pattern in patterns or ()]
    return re.compile("|".join(parts)) if parts else None
