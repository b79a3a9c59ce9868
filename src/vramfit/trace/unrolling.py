"""Traces that do not grow with depth: of layers that are alike four run, and the stream of all follows from theirs.

A pass goes through the first layer, two from the middle and the last one. Where the two in the middle ask for the same,
entry by entry, every layer between them does as well: what one of them wrote is written again for each layer that did
not run, with blocks and module paths of its own. Everything else (weights, optimizer steps) is traced in full. Where
the two differ, `Unlike` is raised, and the model is traced layer by layer.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from vramfit.models.anatomy import layer_list
from vramfit.models.resolve import ResolvedModel
from vramfit.records.stream import Origin
from vramfit.trace.template import Did, Entry, Launch, Release, Request
from vramfit.trace.zones import NUM_RUN, Zone, find_zones
from vramfit.workload import Workload


class Unlike(Exception):
    """Layers that were taken to be alike are not."""


class Unrolling:
    """Has few layers of a model run, and writes what all of them would have asked for.

    Args:
        model: with its techniques applied.
        zones: where layers repeat.
    """

    def __init__(self, model: torch.nn.Module, zones: Sequence[Zone]) -> None:
        layers = layer_list(model)
        assert layers is not None
        self._layers = layers
        self._all = dict(layers._modules)
        path = next(name for name, module in model.named_modules() if module is layers)
        self._zones = [_ZoneWriter(zone, path, list(layers)) for zone in zones]
        skipped = {str(i) for zone in zones for group in zone.skipped() for i in zone.layers(group)}
        self._few = {name: layer for name, layer in self._all.items() if name not in skipped}
        self._lists = _lists_of_layers(model, len(layers))

    @contextmanager
    def shortened(self, model: torch.nn.Module) -> Iterator[None]:
        """While it lasts, a forward pass of the model goes through few of its layers."""
        handles = [
            model.register_forward_pre_hook(self._shorten, prepend=True),
            model.register_forward_hook(self._restore, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._restore(model, (), None)

    def _shorten(self, model: torch.nn.Module, args: Any) -> None:
        self._layers._modules = self._few
        for settings, name, every in self._lists:
            settings[name] = [every[int(layer)] for layer in self._few]

    def _restore(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        self._layers._modules = self._all
        for settings, name, every in self._lists:
            settings[name] = every

    def unroll(self, entries: list[Entry], ledger: Any) -> list[Entry]:
        """The entries of a pass through all layers, from those of one through few.

        Raises:
            Unlike: layers in the middle do not ask for the same.
        """
        for zone in self._zones:
            entries = zone.unroll(entries, ledger)
        for zone in self._zones:
            zone.bring_gradients(ledger)
        if not _left_by(entries) <= ledger.living() | ledger.for_good:
            raise Unlike("what is left after a pass is not what layers hold")
        return entries


def unrolling_of(model: torch.nn.Module, resolved: ResolvedModel, workload: Workload) -> Unrolling | None:
    """None where every layer is traced: modules of the user's may do anything, and what several GPUs, host memory or a
    compiler do to layers is not the same for all of them."""
    if resolved.module is not None or workload.num_gpus > 1 or workload.offloads or workload.is_compiled:
        return None
    zones = find_zones(model)
    return Unrolling(model, zones) if zones else None


def _lists_of_layers(model: torch.nn.Module, num_layers: int) -> list[tuple[dict[str, Any], str, list[Any]]]:
    """Settings that say something of each layer, such as which tokens it sees: models look them up by place."""
    configs = {id(m.config): vars(m.config) for m in model.modules() if hasattr(getattr(m, "config", None), "to_dict")}
    return [
        (settings, name, value)
        for settings in configs.values()
        for name, value in settings.items()
        if isinstance(value, list) and len(value) == num_layers
    ]


def _left_by(entries: list[Entry]) -> set[int]:
    """The blocks that entries ask for and leave.

    Raises:
        Unlike: one goes before it comes.
    """
    left: set[int] = set()
    gone: set[int] = set()
    for entry in entries:
        if type(entry) is Request:
            left.add(entry.id)
        elif type(entry) is Launch:
            left.update(entry.outputs)
        elif type(entry) is Release:
            gone.add(entry.id)
            left.discard(entry.id)
    if left & gone:
        raise Unlike("a block goes before it comes")
    return left - {0}


Key = tuple[int, Any]
"""A block of a group: the group's rank, and who in the group asked for it, and the how-manieth time."""


@dataclass(frozen=True, slots=True)
class _Sweep:
    """Entries in which each group does what the one before did: `entries[t + period]` is `entries[t]` of the next."""

    begin: int
    end: int
    period: int
    direction: int
    """1: upwards through the layers, -1: downwards."""


class _ZoneWriter:
    """Writes what all groups of a zone ask for, from what those that run asked for."""

    def __init__(self, zone: Zone, path: str, layers: list[torch.nn.Module]) -> None:
        self._zone, self._path, self._layers = zone, path, layers
        self._rank_of_layer = {
            index: (rank, index - zone.index(zone.group_of_rank(rank), 0))
            for rank in range(NUM_RUN)
            for index in zone.layers(zone.group_of_rank(rank))
        }
        self._keys: dict[int, Key] = {}
        self._ids: dict[Key, int] = {}
        """Key → id, of groups that run."""
        self._num_asked: Counter[Key] = Counter()
        self._origins: dict[int, tuple[int | None, Any, str]] = {}
        self._moved_origins: dict[tuple[int, int], int] = {}
        self._fresh: dict[Key, int] = {}
        """The same of groups that do not run, by the number of the group."""

    def unroll(self, entries: list[Any], ledger: Any) -> list[Any]:
        self._ledger = ledger
        anchors, forms = self._described(entries)
        written: list[Any] = []
        done = 0
        for sweep in self._sweeps(entries, anchors, forms):
            if sweep.begin < done:
                raise Unlike("sweeps overlap")
            written += entries[done : sweep.begin]
            written += self._extended(entries, sweep)
            done = sweep.end
        return written + entries[done:]

    def _described(self, entries: list[Any]) -> tuple[list[int | None], list[Any]]:
        """For each entry the rank of the group it belongs to, and what must be equal in another group's."""
        anchors: list[int | None] = []
        forms: list[Any] = []
        for entry, rank in zip(entries, self._ranks(entries), strict=True):
            kind = type(entry)
            form: Any
            if kind is Request or kind is Launch:
                _, origin, _ = self._origin(entry.origin)
                outputs = (entry.id,) if kind is Request else entry.outputs
                for id_ in outputs:
                    self._register(id_, rank, origin)
                asked = (entry.size, entry.cuda_stream) if kind is Request else entry.call
                form = (asked, origin, tuple([self._relative(i, rank) for i in outputs]))
            elif kind is Release:
                key = self._keys.get(entry.id)
                rank = None if key is None else key[0]
                form = (Release, entry.id if key is None else key[1])
            elif kind is Did:
                form = (entry.work, entry.phase, entry.num_calls)
            else:
                form = entry
            anchors.append(rank)
            forms.append(form)
        return anchors, forms

    def _ranks(self, entries: list[Any]) -> list[int | None]:
        """For each request the rank of the group that makes it.

        What no layer asks for itself, as sums of gradients, counts to the layer that comes next.
        """
        ranks: list[int | None] = []
        coming: int | None = None
        for entry in reversed(entries):
            if type(entry) is not Request and type(entry) is not Launch:
                ranks.append(None)
                continue
            rank, _, module = self._origin(entry.origin)
            if rank is not None or not self._path.startswith(module):
                coming = rank
            ranks.append(coming)
        ranks.reverse()
        return ranks

    def _register(self, id_: int, rank: int | None, origin: Any) -> None:
        if rank is not None and id_:
            self._num_asked[rank, origin] += 1
            key = (rank, (origin, self._num_asked[rank, origin]))
            self._keys[id_] = key
            self._ids[key] = id_

    def _relative(self, id_: int, rank: int | None) -> Any:
        key = self._keys.get(id_)
        return id_ if key is None or rank is None else (key[0] - rank, key[1])

    def _origin(self, index: int) -> tuple[int | None, Any, str]:
        """The rank of an origin's group, what of it is the same in every group, and its module."""
        found = self._origins.get(index)
        if found is None:
            origin = self._ledger.template.origins[index]
            rank, module = None, origin.module
            if module.startswith(self._path + "."):
                number, _, rest = module[len(self._path) + 1 :].partition(".")
                if int(number) in self._rank_of_layer:
                    rank, place = self._rank_of_layer[int(number)]
                    module = (place, rest)
            found = self._origins[index] = (rank, (origin.operator, origin.part, module), origin.module)
        return found

    def _sweeps(self, entries: list[Any], anchors: list[int | None], forms: list[Any]) -> list[_Sweep]:
        """Where the groups in the middle stand, sweep by sweep."""
        places: dict[Any, int] = {}
        for position, (entry, rank) in enumerate(zip(entries, anchors, strict=True)):
            if rank == 2 and type(entry) in (Request, Release, Launch):
                places[type(entry), self._ordinal(entry)] = position
        sweeps: list[_Sweep] = []
        for position, (entry, rank) in enumerate(zip(entries, anchors, strict=True)):
            if rank != 1 or type(entry) not in (Request, Release, Launch):
                continue
            if sweeps and position < sweeps[-1].end:
                continue
            partner = places.get((type(entry), self._ordinal(entry)))
            if partner is None:
                raise Unlike(f"no partner for {entry}")
            sweeps.append(self._sweep(min(position, partner), partner - position, anchors, forms))
            if sweeps[-1].end <= position:
                raise Unlike(f"a sweep without {entry}")
        return sweeps

    def _ordinal(self, entry: Any) -> Any:
        id_ = next((i for i in entry.outputs if i), 0) if type(entry) is Launch else entry.id
        return self._keys[id_][1] if id_ else None

    def _sweep(self, start: int, distance: int, anchors: list[int | None], forms: list[Any]) -> _Sweep:
        period, direction = abs(distance), 1 if distance > 0 else -1

        def goes_on(t: int) -> bool:
            a, b = anchors[t], anchors[t + period]
            if forms[t] != forms[t + period] or (a is None) != (b is None):
                return False
            return a is None or b - a == direction  # type: ignore[operator]

        begin = start
        while begin > 0 and goes_on(begin - 1):
            begin -= 1
        end = start
        while end + period < len(forms) and goes_on(end):
            end += 1
        if end - begin < period:
            raise Unlike(f"only {end - begin} of {period} entries are alike, from {start}")
        return _Sweep(begin, end + period, period, direction)

    def _extended(self, entries: list[Any], sweep: _Sweep) -> list[Any]:
        """What all groups do, from what those that run did."""
        num = self._zone.num_skipped
        block, rest = entries[sweep.begin : sweep.begin + sweep.period], entries[sweep.begin + sweep.period : sweep.end]
        shifts = range(num + 1) if sweep.direction > 0 else range(num, -1, -1)
        written = [self._moved(entry, shift) for shift in shifts for entry in block]
        return written + [self._moved(entry, shifts[-1]) for entry in rest]

    def _moved(self, entry: Any, shift: int) -> Any:
        """What the group does that is so many groups on."""
        kind = type(entry)
        if kind is Request:
            return Request(
                self._id(entry.id, shift), entry.size, self._moved_origin(entry.origin, shift), entry.cuda_stream
            )
        if kind is Release:
            return Release(self._id(entry.id, shift))
        if kind is Launch:
            outputs = tuple([self._id(i, shift) for i in entry.outputs])
            return Launch(entry.call, outputs, self._moved_origin(entry.origin, shift))
        return entry

    def _id(self, id_: int, shift: int) -> int:
        key = self._keys.get(id_)
        return id_ if key is None else self._id_in_group(key[0] + shift, key[1])

    def _id_in_group(self, group: int, ordinal: Any) -> int:
        num = self._zone.num_skipped
        if group < 2 or group >= 2 + num:
            found = self._ids.get((group if group < 2 else group - num, ordinal))
            if found is None:
                raise Unlike(f"group {group} has no block {ordinal}")
            return found
        key = (group, ordinal)
        if key not in self._fresh:
            self._fresh[key] = self._ledger.new_id()
        return self._fresh[key]

    def _moved_origin(self, index: int, shift: int) -> int:
        rank, form, _ = self._origin(index)
        if rank is None:
            return index
        found = self._moved_origins.get((index, shift))
        if found is None:
            origin = self._ledger.template.origins[index]
            operator, part, (place, rest) = form
            number = self._zone.index(rank + shift, place)
            module = f"{self._path}.{number}" + (f".{rest}" if rest else "")
            found = index if module == origin.module else self._ledger.index(Origin(operator, module, part))
            self._moved_origins[index, shift] = found
        return found

    @cached_property
    def _parameters(self) -> list[tuple[torch.nn.Parameter, dict[int, torch.nn.Parameter]]]:
        """Each parameter of the second group, with those in its place in groups that do not run."""
        found = []
        for place, index in enumerate(self._zone.layers(1)):
            others = {g: self._layers[self._zone.layers(g)[place]] for g in self._zone.skipped()}
            named = {g: dict(layer.named_parameters()) for g, layer in others.items()}
            for name, parameter in self._layers[index].named_parameters():
                found.append((parameter, {g: parameters[name] for g, parameters in named.items()}))
        return found

    def bring_gradients(self, ledger: Any) -> None:
        """Parameters that took no part in a pass have gradients as those that did.

        Raises:
            Unlike: something else of a layer outlives a pass.
        """
        by_block: dict[int, list[int]] = {}
        for number, (parameter, others) in enumerate(self._parameters):
            id_ = None if parameter.grad is None else ledger.id_of(parameter.grad)
            if id_ is not None and id_ not in self._keys:
                continue  # made outside of passes, for all parameters
            if id_ is not None:
                by_block.setdefault(id_, []).append(number)
            for group, other in others.items():
                if other.grad is not None and ledger.id_of(other.grad) != self._wanted(id_, group):
                    ledger.forget(other.grad)
                    other.grad = None
        held = self._gradients(ledger)
        if any(id_ in self._keys for id_ in ledger.living() - held.keys()):
            raise Unlike("a layer keeps something besides gradients after a pass")
        ledger.renumber(held)
        for id_, numbers in by_block.items():
            gradients = [self._parameters[number][0].grad for number in numbers]
            for group in self._zone.skipped():
                parameters = [self._parameters[number][1][group] for number in numbers]
                if any(p.grad is None for p in parameters):
                    for parameter, twin in zip(
                        parameters, ledger.twins(gradients, self._wanted(id_, group)), strict=True
                    ):
                        parameter.grad = twin

    def _gradients(self, ledger: Any) -> dict[int, int]:
        """The blocks of gradients of layers that run, and their numbers among all layers.

        One may count to a neighbouring group, whose number is another where there are groups between the two.
        """
        found: dict[int, int] = {}
        for rank in range(NUM_RUN):
            group = self._zone.group_of_rank(rank)
            for parameter in (p for i in self._zone.layers(group) for p in self._layers[i].parameters()):
                id_ = None if parameter.grad is None else ledger.id_of(parameter.grad)
                if id_ is not None:
                    found[id_] = self._id(id_, group - rank) if id_ in self._keys else id_
        return found

    def _wanted(self, id_: int | None, group: int) -> int | None:
        return None if id_ is None else self._id(id_, group - 1)
