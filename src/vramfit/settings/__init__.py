"""Settings: a module a technique, and what is not one besides; found here, asked for by everything else.

To add a technique, add a module with a `Setting`: see `docs/add-a-technique.md`.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, make_dataclass
from typing import TYPE_CHECKING, Any, get_args

from vramfit.settings.precision import lowered, usual_precision
from vramfit.settings.setting import BF16_CAPABILITY, TRITON_CAPABILITY, Kind, Setting, Technique

if TYPE_CHECKING:
    from vramfit.workload import Workload

KINDS: tuple[Kind, ...] = get_args(Kind)
"""The mildest first."""


def _find() -> Iterator[Setting]:
    for module in pkgutil.iter_modules(__path__):
        members = vars(importlib.import_module(f"{__name__}.{module.name}")).values()
        for member in members:
            is_setting = inspect.isclass(member) and issubclass(member, Setting) and hasattr(member, "keyword")
            if is_setting and member.__module__ == f"{__name__}.{module.name}":
                yield member()


SETTINGS: Mapping[str, Setting] = {s.keyword: s for s in sorted(_find(), key=lambda s: s.order)}
"""Keyword → setting, in the order of `Workload`."""
APPLIED: tuple[Setting, ...] = tuple(sorted((s for s in SETTINGS.values() if s.applied), key=lambda s: s.applied))
"""Settings that change a model, in the order in which they do."""
PLANNED: tuple[str, ...] = tuple(s.keyword for s in SETTINGS.values() if s.is_planned)
"""Keywords that a plan chooses where the user does not."""
ALLOWABLE: Mapping[str, str] = {name: means for s in SETTINGS.values() for name, means in s.allows}
"""What a plan uses only where it is allowed → what it means."""
TECHNIQUES: tuple[Technique, ...] = tuple(
    t for kind in KINDS for s in SETTINGS.values() for t in s.all_techniques if t.kind == kind
)
"""Every technique, the mildest kind first."""


def having(**flags: Any) -> tuple[str, ...]:
    """Keywords of the settings with these class variables.

    >>> having(at_load=True)
    ('model', 'task', 'num_labels', 'pooling', 'precision', 'attention', 'quantize', 'offload', 'memory')
    """
    return tuple(s.keyword for s in SETTINGS.values() if all(getattr(s, name) == v for name, v in flags.items()))


def find(keyword: str, value: Any) -> Technique | None:
    """The technique that a keyword's value is; None for what is no technique, such as fp32.

    >>> find("precision", "amp-bf16").kind
    'numeric'
    """
    return SETTINGS[keyword].technique(value)


def used_by(workload: "Workload") -> tuple[Technique, ...]:
    """The techniques that a workload asks for, the mildest kind first."""
    found = (s.technique(getattr(workload, s.keyword)) for s in SETTINGS.values())
    return tuple(sorted((t for t in found if t is not None), key=TECHNIQUES.index))


def given_in(workload: "Workload") -> list[Setting]:
    """The settings that are not as they are by themselves."""
    return [s for s in SETTINGS.values() if getattr(workload, s.keyword) != s.default]


def seen_in_trace(workload: "Workload", *parts: str) -> tuple[Any, ...]:
    """What a trace sees of a workload: workloads that are equal in it have the same trace, sizes aside.

    Args:
        parts: `layers`, or `layers` and `step`: of what the traces are the same.
    """
    return tuple(s.seen_in_trace(workload) for s in SETTINGS.values() if s.in_trace in parts)


def conflicts(workload: "Workload", capability: tuple[int, int], gpu: str) -> list[str]:
    """Why a workload cannot run on a GPU, one sentence a problem; empty where it can.

    What contradicts itself on any GPU is refused by `Workload`, and what a model does not have by `apply`.

    Args:
        capability: the GPU's compute capability.
        gpu: its name, for the sentences.
    """
    which = f"{gpu} (sm_{capability[0]}{capability[1]})"
    return [text for s in given_in(workload) for text in s.gpu_problems(workload, capability, which)]


def in_words(workload: "Workload") -> list[str]:
    """Phrases for how a workload is done, but for what is as it is by itself."""
    found = (s.words(workload) for s in SETTINGS.values() if s.group != "job")
    return [text for text in found if text is not None]


CHOSEN: tuple[str, ...] = tuple(s.keyword for s in SETTINGS.values() if s.is_planned and s.is_in_run)
"""Keywords that a plan chooses and a person may: what is said of a plan in a line."""


LIVE: tuple[str, ...] = having(is_live=True)
"""Keywords that a run can have another value of from one step to the next."""


def chosen_in_words(workload: "Workload") -> list[str]:
    """Phrases for what a plan chooses, but for how the batch is split."""
    return [text for text in (SETTINGS[name].brief(workload) for name in CHOSEN) if text is not None]


def completed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that were given, and those that they need and nobody gave.

    >>> completed({"offload": "weights"})
    {'offload': 'weights', 'checkpointing': 'full'}
    """
    texts = [(name, value) for name, value in given.items() if name in SETTINGS and isinstance(value, str)]
    needed = {key: value for name, text in texts for key, value in SETTINGS[name].implies.get(text, {}).items()}
    return {**given, **{name: value for name, value in needed.items() if name not in given}}


def _questions(keywords: Iterable[str]) -> dict[str, property]:
    settings = [SETTINGS[name] for name in keywords if name in SETTINGS]
    return {question.__name__: property(question) for s in settings for question in s.asked}


def asked_of(*keywords: str) -> Any:
    """A class with what is `asked` of these settings, to be the base of a record that has them."""
    return type("Asked", (), {"__slots__": (), **_questions(keywords)})


def record_of(fields: Iterable[tuple[str, Any, Any]], module: str) -> Any:
    """A frozen dataclass with these fields, to be the base of a class; it has what is `asked` of settings among them.

    Args:
        fields: name, type and default of each; `...` stands for no default.
        module: the module that the class is in.
    """
    made = [(name, kind) if default is ... else (name, kind, field(default=default)) for name, kind, default in fields]
    namespace = {"__post_init__": lambda self: None, "__module__": module, **_questions(name for name, *_ in made)}
    return make_dataclass("Fields", made, namespace=namespace, frozen=True, kw_only=True, slots=True)


__all__ = [
    "ALLOWABLE",
    "APPLIED",
    "BF16_CAPABILITY",
    "CHOSEN",
    "KINDS",
    "LIVE",
    "PLANNED",
    "SETTINGS",
    "TECHNIQUES",
    "TRITON_CAPABILITY",
    "Kind",
    "Setting",
    "Technique",
    "asked_of",
    "chosen_in_words",
    "completed",
    "conflicts",
    "find",
    "given_in",
    "having",
    "in_words",
    "lowered",
    "record_of",
    "seen_in_trace",
    "used_by",
    "usual_precision",
]
