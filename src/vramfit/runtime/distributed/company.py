"""`Company`: the processes of one run as training sees them: who leads, what all share, who works on which device."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from vramfit.runtime.distributed.accord import Accord
from vramfit.runtime.distributed.heartbeat import Heartbeat
from vramfit.runtime.distributed.world import World, join, launched_world, leave
from vramfit.step.ranks import Ranks, Unanimous

Made = TypeVar("Made")


class Company:
    """The processes of one run; often there is one.

    Args:
        world: None where this process is alone.
        accord: their votes.
    """

    def __init__(self, world: World | None = None, accord: Accord | None = None) -> None:
        self.rank = 0 if world is None else world.rank
        self.size = 1 if world is None else world.size
        self.local_rank = 0 if world is None else world.local_rank
        self.accord: Accord | Unanimous = Unanimous() if accord is None else accord
        self.ranks: Ranks | None = None
        """How they share the model, once it is there."""

    @property
    def leads(self) -> bool:
        """Whether this process speaks, reads checkpoints and writes: rank 0."""
        return self.rank == 0

    @property
    def shards(self) -> bool:
        """Whether each has a part of the model only."""
        return self.ranks is not None and self.ranks.is_sharded

    def first(self, make: Callable[[], Made]) -> Made:
        """What rank 0 makes, for all; where it fails there, all stop."""
        if not isinstance(self.accord, Accord):
            return make()
        made: Made = self.accord.broadcast(make() if self.leads else None)
        return made

    def first_tensors(self, read: Callable[[], Mapping[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
        """Tensors that rank 0 reads, in the host's memory of all."""
        if not isinstance(self.accord, Accord):
            return read()
        own = read() if self.leads else {}
        shapes = self.accord.broadcast([(name, t.shape, t.dtype) for name, t in own.items()])
        return {
            name: self.accord.broadcast_tensor(
                own[name].contiguous() if self.leads else torch.empty(shape, dtype=dtype)
            )
            for name, shape, dtype in shapes
        }

    def gather(self, value: Any) -> list[Any]:
        """What every process has, by rank."""
        return self.accord.gather(value) if isinstance(self.accord, Accord) else [value]

    def share(self, model: torch.nn.Module, parallel: str | None) -> Ranks | None:
        """Share a model that every process has loaded; None for one process."""
        if not isinstance(self.accord, Accord):
            return None
        from vramfit.runtime.distributed.replicas import Replicas
        from vramfit.runtime.distributed.sharded import Shards

        self.ranks = Shards(model, self.accord) if parallel == "fsdp" else Replicas(model, self.accord)
        return self.ranks


def own_device(name: str | None) -> str | None:
    """The device of this process: its own GPU where several were launched and none is named by number."""
    world = launched_world()
    if world is None or name not in (None, "cuda") or not torch.cuda.is_available():
        return name
    return f"cuda:{world.local_rank}"


@contextmanager
def company(device: str | None) -> Iterator[Company]:
    """Inside, the processes that were launched together work together; whatever ends one ends all.

    Args:
        device: what the run was asked for; decides how they talk.

    Raises:
        VramfitError: they did not meet.
        RankFailed: another one has stopped.
    """
    world = launched_world()
    if world is None:
        yield Company()
        return
    named = own_device(device) or "cpu"
    join(world, torch.device("cpu" if named == "emulated" else named))
    accord = Accord(world.rank, world.size)
    heartbeat = Heartbeat(world.rank, world.size)
    heartbeat.start()
    try:
        yield Company(world, accord)
        accord.agree()
    except BaseException as error:
        accord.give_up(error)
        raise
    finally:
        heartbeat.stop()
        leave()
