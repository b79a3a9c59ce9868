"""`Zone`: neighbouring layers that are alike, of which few need to run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.models.anatomy import layer_list

NUM_RUN = 4
"""Groups of layers that run: the first, two from the middle, the last."""
LEAST_SKIPPED = 2
"""Layers that must be saved; with fewer, a trace of all is as quick."""
LONGEST_PERIOD = 6
"""Layers of different kinds that take turns: ModernBERT's third layers see all tokens."""


@dataclass(frozen=True, slots=True)
class Zone:
    """Neighbouring layers in groups that are alike; the first group may have fewer layers than the others, or more."""

    start: int
    first: int
    """Layers in the first group."""
    period: int
    """Layers in each further group."""
    num_groups: int

    @property
    def num_skipped(self) -> int:
        """Groups that do not run."""
        return self.num_groups - NUM_RUN

    def layers(self, group: int) -> range:
        """The indices of a group's layers."""
        if group == 0:
            return range(self.start, self.start + self.first)
        begin = self.start + self.first + (group - 1) * self.period
        return range(begin, begin + self.period)

    def index(self, group: int, place: int) -> int:
        """The index of the layer in a place of a group; places are counted back from its last layer."""
        return self.layers(group).stop - self.period + place

    def group_of_rank(self, rank: int) -> int:
        """The group that runs in this place: 0 and 1 are the first two, 2 and 3 the last two."""
        return rank if rank < 2 else rank + self.num_skipped

    def skipped(self) -> range:
        """Groups that do not run."""
        return range(2, 2 + self.num_skipped)


def find_zones(model: torch.nn.Module) -> tuple[Zone, ...]:
    """Where a model's layers repeat often enough to run a few of them; nothing where they do not."""
    layers = layer_list(model)
    if layers is None or len(layers) < NUM_RUN + LEAST_SKIPPED:
        return ()
    kinds = [_kind(layer, index) for index, layer in enumerate(layers)]
    return _even_zones(kinds) or _periodic_zone(kinds)


def _even_zones(kinds: Sequence[Any]) -> tuple[Zone, ...]:
    """Runs of equal kinds."""
    zones, start = [], 0
    for end in range(1, len(kinds) + 1):
        if end == len(kinds) or kinds[end] != kinds[start]:
            zones.append(Zone(start, 1, 1, end - start))
            start = end
    return tuple(zone for zone in zones if zone.num_skipped >= LEAST_SKIPPED)


def _periodic_zone(kinds: Sequence[Any]) -> tuple[Zone, ...]:
    """Kinds that take turns, but for the first layer, which may be a kind of its own.

    The first group has a layer of every kind: what all layers of a kind share goes with the lowest one's backward.
    """
    for period in range(2, LONGEST_PERIOD + 1):
        if all(a == b for a, b in zip(kinds[1:], kinds[1 + period :], strict=False)):
            first = (len(kinds) - 1) % period + 1 + period
            zone = Zone(0, first, period, 1 + (len(kinds) - first) // period)
            return (zone,) if zone.num_skipped > 0 else ()
    return ()


def _kind(layer: torch.nn.Module, index: int) -> tuple[Any, ...]:
    """Equal for layers that compute alike: the same modules with the same settings and weights of the same shapes."""
    found: list[Any] = []
    for path, module in layer.named_modules():
        settings = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str | tuple)}
        indices = {
            k for k, v in settings.items() if v == index and type(v) is int and k.endswith(("idx", "id", "index"))
        }
        plain = tuple((k, v) for k, v in sorted(settings.items()) if k not in indices and _is_plain(v))
        weights = tuple(
            (name, None if p is None else (type(p), tuple(p.shape), p.dtype, p.requires_grad))
            for name, p in (*module._parameters.items(), *module._buffers.items())
        )
        hooks = (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks))
        found.append((path, type(module), "forward" in vars(module), plain, weights, hooks))
    return tuple(found)


def _is_plain(value: Any) -> bool:
    return not isinstance(value, tuple) or all(isinstance(v, bool | int | float | str) for v in value)
