"""`search`: the fastest settings that fit, best first, predicting as little as will do.

Settings wait in a queue by the time they take, or could take at best. Without checkpointing and with all layers
checkpointed, recipes are traced; memory and time of a number of layers between lie between, and are traced only when
their turn comes. What comes out first and fits is the fastest: everything behind it takes longer.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from vramfit.errors import MissingExtra, TraceError, WorkloadError
from vramfit.planner.heuristics import MAX_TRACED_BETWEEN
from vramfit.planner.job import Job, num_layers
from vramfit.planner.predictions import (
    Choice,
    Peek,
    fits_host,
    floor_bytes,
    is_lean,
    peek,
    safe_bytes,
    step_time,
    timed_batch,
    weight_bytes,
)
from vramfit.planner.recipes import Recipe, checkpointing_steps, micro_batches


@dataclass(slots=True)
class _Family:
    """Recipes that differ only in how many layers are checkpointed."""

    recipe: Recipe
    sibling: "_Family | None" = None
    """With another optimizer, whose steps are alike otherwise; None for the first."""
    plain: dict[int, Peek] = field(default_factory=dict)
    full: dict[int, Peek] = field(default_factory=dict)
    """Micro-batch → a look at it, with no layer and with all layers checkpointed; empty where it was not traced."""
    error_bytes: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    """How much more than guessed was found: with several full passes a step, and with one."""

    @property
    def lender(self) -> "_Family":
        """Whose traces say what checkpointing changes: the sibling's, unless it was given up before it was traced."""
        return self if self.sibling is None or len(self.sibling.plain) < len(self.plain) else self.sibling

    def guess(self, num_checkpointed: int, num_layers: int, micro_batch: int) -> Peek:
        """Time and memory with some layers checkpointed: both go in a straight line."""
        plain = self.plain[micro_batch]
        if not num_checkpointed:
            return plain
        full, start = self.lender.full[micro_batch], self.lender.plain[micro_batch]
        share = num_checkpointed / num_layers

        def asks() -> tuple[int, int]:
            added_bytes = int(share * (full.requested_bytes - start.requested_bytes))
            return plain.requested_bytes + added_bytes, plain.floor_bytes

        return Peek(plain.step_time_s + share * (full.step_time_s - start.step_time_s), asks)


class Search:
    """A search over the recipes of one training.

    Args:
        job: what is asked for.
        recipes: without checkpointing, unless it is fixed; the first optimizer's first. All or none are packed.
        limit_bytes: what may be reserved.
    """

    def __init__(self, job: Job, recipes: Sequence[Recipe], limit_bytes: int) -> None:
        self.job = job
        self.limit_bytes = limit_bytes
        self.sizes = micro_batches(job.request, timed_batch(job, recipes[0]) if recipes else job.base.share)
        self.tried: list[Choice] = []
        self.families: list[_Family] = []
        self.not_available: list[str] = []
        self._num_layers = num_layers(job)
        self._recipes = list(recipes)
        self._queue: list[tuple[float, int, Callable[[], Choice | None]]] = []
        self._order = count()
        self._num_between = 0

    def run(self) -> Choice | None:
        """The fastest choice that fits; None if none does."""
        if not self._recipes:
            return None
        first = self._recipes[0]
        for recipe in self._recipes:
            may_open = recipe.steps_like(first) or self._is_hopeless(first)
            if may_open and not self._is_hopeless(recipe):
                self._open(_Family(recipe))
        while self._queue:
            _, _, look = heapq.heappop(self._queue)
            found = look()
            if found is not None:
                return found
        return None

    def _is_hopeless(self, recipe: Recipe) -> bool:
        """Whether its optimizer's step alone is too much, with weights and gradients: so it is in any precision."""
        return any(self._is_too_much(f) for f in self.families if f.recipe.steps_like(recipe))

    def _is_too_much(self, family: _Family) -> bool:
        return not family.plain or family.plain[self.sizes[-1]].floor_bytes > self.limit_bytes

    def _never_fits(self, family: _Family) -> bool:
        """Whether the smallest passes ask for too much, with all layers checkpointed too: so do all larger ones.

        The texts that a step compares take the same memory in any split; without this, a batch of very many would be
        looked at in hundreds of them.
        """
        smallest, spared_bytes = self.sizes[-1], self._gradient_bytes(family)  # one pass holds no gradients
        recipes = [family.recipe]
        if checkpointing_steps(self.job, family.recipe):
            recipes.append(family.recipe.with_layers(self._num_layers, self._num_layers))
        asked = (peek(self.job, recipe, smallest).requested_bytes for recipe in recipes)
        return all(requested_bytes - spared_bytes > self.limit_bytes for requested_bytes in asked)

    def _push(self, seconds: float, look: Callable[[], Choice | None]) -> None:
        """Have this looked at when its turn comes, by the seconds that it takes at best."""
        heapq.heappush(self._queue, (seconds, next(self._order), look))

    def _open(self, family: _Family) -> None:
        """Trace a recipe, unless that is hopeless, and put its splits of the batch in the queue."""
        try:
            if floor_bytes(self.job, family.recipe) <= self.limit_bytes and fits_host(self.job, family.recipe):
                family.plain = {self.sizes[-1]: peek(self.job, family.recipe, self.sizes[-1])}
        except (MissingExtra, WorkloadError, TraceError) as error:
            if not self.families:
                raise  # what was asked for does not go
            self.not_available.append(f"{family.recipe.beside(self._recipes[0])} was left out: {error}")
            return
        self.families.append(family)
        if self._is_too_much(family):
            return  # no split and no checkpointing will help
        if self._never_fits(family):
            self._push_eight_bit(family)
            return
        family.plain = {m: peek(self.job, family.recipe, m) for m in self.sizes}
        self._push_eight_bit(family)
        fastest = min(p.step_time_s for p in family.plain.values())
        for size in self.sizes:
            self._push_guess(_Guess(family, 0, size))
        if checkpointing_steps(self.job, family.recipe):
            full = family.recipe.with_layers(self._num_layers, self._num_layers)
            self._push(fastest * self.price(full), partial(self._checkpoint, family))

    def _push_eight_bit(self, family: _Family) -> None:
        """Queue the same recipe with another optimizer; at best, it is as fast."""
        fastest = min(p.step_time_s for p in family.plain.values())
        for recipe in self._recipes if family.sibling is None else ():
            alike = recipe.with_any_optimizer() == family.recipe.with_any_optimizer()
            if alike and not recipe.steps_like(family.recipe):
                self._push(fastest * self.price(recipe), partial(self._open, _Family(recipe, sibling=family)))

    def _checkpoint(self, family: _Family) -> None:
        """Trace a recipe with all layers checkpointed, and queue every number of layers."""
        lender = family.lender
        if not lender.full:
            recipe = lender.recipe.with_layers(self._num_layers, self._num_layers)
            lender.full = {m: peek(self.job, recipe, m) for m in self.sizes}
        for num_checkpointed in checkpointing_steps(self.job, family.recipe):
            for size in self.sizes:
                self._push_guess(_Guess(family, num_checkpointed, size))

    def price(self, recipe: Recipe) -> float:
        """What its time counts for beside simpler settings."""
        return recipe.price(rehearses=self.job.request.rehearses)

    def _push_guess(self, guess: "_Guess") -> None:
        self._push(self._look(guess).step_time_s * self.price(self._recipe(guess)), partial(self._check, guess))

    def _look(self, guess: "_Guess") -> Peek:
        return guess.family.guess(guess.num_checkpointed, self._num_layers, guess.micro_batch)

    def _recipe(self, guess: "_Guess") -> Recipe:
        return guess.family.recipe.with_layers(guess.num_checkpointed, self._num_layers)

    def _check(self, guess: "_Guess") -> Choice | None:
        """The choice if it fits; only what may fit is predicted in full."""
        looked = self._look(guess)
        between = 0 < guess.num_checkpointed < self._num_layers
        single = is_lean(self.job, guess.micro_batch)
        guessed = looked.requested_bytes
        if single:
            guessed -= self._gradient_bytes(guess.family)  # one pass holds no gradients while it goes forward
        error_bytes = guess.family.error_bytes[single] if between or single else 0
        if guessed + error_bytes > self.limit_bytes or (between and self._num_between >= MAX_TRACED_BETWEEN):
            return None
        self._num_between += between
        choice = self.predict(self._recipe(guess), guess.micro_batch)
        if choice.safe_reserved_bytes <= self.limit_bytes:
            return self._fewer_layers(guess, choice) if between else choice
        if between or single:
            guess.family.error_bytes[single] = max(error_bytes, choice.safe_reserved_bytes - guessed)
        return None

    def _fewer_layers(self, guess: "_Guess", found: Choice) -> Choice:
        """Guesses lie above what is found: where there is room for it, fewer layers are tried once."""
        none, one = (self._look(replace(guess, num_checkpointed=k)).requested_bytes for k in (0, 1))
        spared = (self.limit_bytes - found.safe_reserved_bytes) // max(none - one, 1)
        fewer = replace(guess, num_checkpointed=max(guess.num_checkpointed - spared, 1))
        if fewer.num_checkpointed == guess.num_checkpointed:
            return found
        choice = self.predict(self._recipe(fewer), guess.micro_batch)
        return choice if choice.safe_reserved_bytes <= self.limit_bytes else found

    def predict(self, recipe: Recipe, micro_batch: int) -> Choice:
        """What settings take, by their own trace."""
        num_bytes = safe_bytes(self.job, recipe, micro_batch)
        choice = Choice(recipe, micro_batch, step_time(self.job, recipe, micro_batch), num_bytes)
        if choice not in self.tried:
            self.tried.append(choice)
        return choice

    def _gradient_bytes(self, family: _Family) -> int:
        """At most: all weights learn. In host memory they take nothing of the device's."""
        recipe = family.recipe
        return weight_bytes(self.job, recipe) if not recipe.offloads else 0

    def fitting(self) -> list[Choice]:
        """What was predicted so far and fits."""
        return [c for c in self.tried if c.safe_reserved_bytes <= self.limit_bytes]

    def largest(self) -> Iterator[Choice]:
        """For each recipe that was traced, none or all layers checkpointed, the fastest split that fits.

        One pass of the whole batch, and passes of one sample, would need traces of their own, and are left out.
        """
        for family in self.families:
            if len(family.plain) < len(self.sizes):
                continue  # not traced, or too much in any split
            for num_checkpointed in (0, self._num_layers) if family.full else (0,):
                recipe = family.recipe.with_layers(num_checkpointed, self._num_layers)
                sizes = [m for m in self.sizes if len(self.sizes) == 1 or (m > 1 and self.job.passes(m) > 1)]
                for size in sorted(sizes, key=lambda m: peek(self.job, recipe, m).step_time_s):
                    if peek(self.job, recipe, size).requested_bytes > self.limit_bytes:
                        continue
                    choice = self.predict(recipe, size)
                    if choice.safe_reserved_bytes <= self.limit_bytes:
                        yield choice
                        break


@dataclass(frozen=True, slots=True)
class _Guess:
    """Settings in the queue."""

    family: _Family
    num_checkpointed: int
    micro_batch: int
