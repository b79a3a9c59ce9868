"""What predictions are made of, counted: models traced, and streams made from traces."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from vramfit.estimator import traced
from vramfit.models.resolve import ResolvedModel
from vramfit.trace.template import StreamTemplate


@dataclass
class Work:
    """What was done since it was asked for."""

    depths: list[int] = field(default_factory=list)
    """Layers of each model that was traced."""
    events: list[int] = field(default_factory=list)
    """Events of each stream that was made, to be replayed."""


def count_work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Count from now on, with no trace kept from before."""
    work = Work()
    trace, instantiate = traced.trace, StreamTemplate.instantiate

    def watched_trace(resolved: ResolvedModel, *arguments: Any, **keywords: Any) -> Any:
        work.depths.append(resolved.config.num_hidden_layers)
        return trace(resolved, *arguments, **keywords)

    def watched_instantiate(template: StreamTemplate, *arguments: Any) -> Any:
        stream = instantiate(template, *arguments)
        work.events.append(len(stream.events))
        return stream

    monkeypatch.setattr(traced, "trace", watched_trace)
    monkeypatch.setattr(traced, "_kept", type(traced._kept)())
    monkeypatch.setattr(StreamTemplate, "instantiate", watched_instantiate)
    return work
