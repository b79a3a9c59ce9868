"""Several models in one budget: what each takes at least, and the rest so that all have batches of as many tokens."""

import multiprocessing
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

from vramfit.errors import NoPlanFits, VramfitError, WorkloadError
from vramfit.serve.pool import START_S, Failed, error_of
from vramfit.serve.settings import Need, ServeSettings
from vramfit.units import format_bytes, parse_bytes


def shared(models: Mapping[str, ServeSettings]) -> dict[str, ServeSettings]:
    """Settings in which each model has its share of the memory; one model keeps all of it.

    Raises:
        WorkloadError: several models, and no memory to share.
        NoPlanFits: the memory does not hold all of them with a text each.
    """
    if len(models) == 1:
        return dict(models)
    memories = {settings.memory for settings in models.values()}
    memory = memories.pop()
    if memory is None:
        raise WorkloadError([f"{len(models)} models need memory: how much they share, such as 2GiB"])
    total = parse_bytes(memory, name="memory")
    found = _elsewhere(list(models.values()))
    if isinstance(found, Failed):
        raise error_of(found)
    sharers = [settings.most_sharers for settings in models.values()]
    shares = divide(total, list(models), [need.times(n) for need, n in zip(found, sharers, strict=True)])
    return {name: replace(settings, memory=shares[name]) for name, settings in models.items()}


def _elsewhere(models: Sequence[ServeSettings]) -> list[Need] | Failed:
    """`needs_of` in a process of its own: torch stays out of this one."""
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context) as worker:
            return worker.submit(needs_of, models).result(START_S)
    except BrokenProcessPool:
        return Failed("the process that plans the models' shares ended", "its last words are above", 1)
    except TimeoutError:
        return Failed(f"the models' shares were not planned within {START_S:.0f} s", None, 1)


def divide(total_bytes: int, names: Sequence[str], needs: Sequence[Need]) -> dict[str, int]:
    """Each model's share: what it takes at least, and of the rest what as many tokens take with each of them.

    Raises:
        NoPlanFits: they take more together.

    >>> divide(1000, ["a", "b"], [Need(300, 1.0), Need(400, 2.0)])
    {'a': 400, 'b': 600}
    """
    least = sum(need.least_bytes for need in needs)
    if least > total_bytes:
        each = ", ".join(f"{name} {format_bytes(need.least_bytes)}" for name, need in zip(names, needs, strict=True))
        raise NoPlanFits(
            f"the models take {format_bytes(least)} with one text each ({each}), and {format_bytes(total_bytes)} is "
            "what they share",
            budget_bytes=total_bytes,
            shortfall_bytes=least - total_bytes,
            hint="give more --memory, serve fewer models, cut the texts (--seq), or take --precision bf16",
        )
    a_token = sum(need.token_bytes for need in needs)
    rest = total_bytes - least
    return {
        name: need.least_bytes + int(rest * need.token_bytes / a_token) for name, need in zip(names, needs, strict=True)
    }


def needs_of(models: Sequence[ServeSettings]) -> list[Need] | Failed:
    """What each model takes; in a process of its own, as it imports torch."""
    from vramfit.quiet import CHATTY, hush
    from vramfit.serve.loading import need_of

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the server's
    hush(*CHATTY)
    try:
        return [need_of(settings) for settings in models]
    except VramfitError as error:
        return Failed(str(error), error.hint, error.exit_code)
