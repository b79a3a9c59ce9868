"""The processes of one run: which one this is, who leads, what all share, and who works on which device.

torchrun makes them, or whatever sets the same variables; often there is one.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vramfit.errors import VramfitError, WorkloadError
from vramfit.runtime.distributed.votes import COLLECTIVE_TIMEOUT_S, Heartbeat, RankVotes
from vramfit.step.splitting import Ranks, Unanimous

Made = TypeVar("Made")
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process, and `accelerate launch` and SageMaker too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """One process among several."""

    rank: int
    size: int
    local_rank: int
    """Its number on this machine, which is also the number of its GPU."""
    local_size: int

    @property
    def num_nodes(self) -> int:
        """Machines."""
        return -(-self.size // self.local_size)

    @staticmethod
    def of(environment: Mapping[str, str]) -> "World | None":
        """What the environment says; None where nobody launched several processes.

        Raises:
            WorkloadError: variables that contradict each other.
        """
        if any(name not in environment for name in NEEDED):
            return None
        numbers = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}
        found: dict[str, int] = {}
        problems = []
        for name, lowest in numbers.items():
            text = environment.get(name)
            if text is None:
                continue
            if not text.isdecimal() or int(text) < (lowest or 0):
                problems.append(f"{name}={text!r} is not a number of processes")
            else:
                found[name] = int(text)
        if not problems and found["RANK"] >= found["WORLD_SIZE"]:
            problems.append(f"RANK={found['RANK']} is beyond WORLD_SIZE={found['WORLD_SIZE']}")
        if problems:
            raise WorkloadError(problems, hint="start with torchrun, which sets them")
        size = found["WORLD_SIZE"]
        return World(
            rank=found["RANK"],
            size=size,
            local_rank=found.get("LOCAL_RANK", found["RANK"]),
            local_size=max(found.get("LOCAL_WORLD_SIZE", size), 1),
        )


def launched_world() -> World | None:
    """The world this process was launched into; None where it is alone."""
    world = World.of(os.environ)
    return world if world is not None and world.size > 1 else None


def join(world: World, device: torch.device) -> None:
    """Meet the other processes, unless that has happened.

    Raises:
        VramfitError: they did not come, or the address cannot be reached.
    """
    if dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        )
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise VramfitError(
            f"rank {world.rank} of {world.size} did not meet the others at {address}: {str(error).splitlines()[0]}",
            hint="start one torchrun on every machine, with the same --nnodes and a --rdzv-endpoint they all reach",
        ) from None


def leave() -> None:
    """Say good-bye; nothing is said where the others are gone."""
    if dist.is_initialized():
        try:
            dist.destroy_process_group()
        except RuntimeError:
            return


class Processes:
    """The processes of one run; often there is one.

    Args:
        world: None where this process is alone.
        votes: their votes.
    """

    def __init__(self, world: World | None = None, votes: RankVotes | None = None) -> None:
        self.rank = 0 if world is None else world.rank
        self.size = 1 if world is None else world.size
        self.local_rank = 0 if world is None else world.local_rank
        self.votes: RankVotes | Unanimous = Unanimous() if votes is None else votes
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
        if not isinstance(self.votes, RankVotes):
            return make()
        made: Made = self.votes.broadcast(make() if self.leads else None)
        return made

    def first_tensors(self, read: Callable[[], Mapping[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
        """Tensors that rank 0 reads, in the host's memory of all."""
        if not isinstance(self.votes, RankVotes):
            return read()
        own = read() if self.leads else {}
        shapes = self.votes.broadcast([(name, t.shape, t.dtype) for name, t in own.items()])
        return {
            name: self.votes.broadcast_tensor(own[name].contiguous() if self.leads else torch.empty(shape, dtype=dtype))
            for name, shape, dtype in shapes
        }

    def gather(self, value: Any) -> list[Any]:
        """What every process has, by rank."""
        return self.votes.gather(value) if isinstance(self.votes, RankVotes) else [value]

    def share(self, model: torch.nn.Module, parallel: str | None) -> Ranks | None:
        """Share a model that every process has loaded; None for one process."""
        if not isinstance(self.votes, RankVotes):
            return None
        from vramfit.runtime.distributed.parallel import Replicas, Shards

        self.ranks = Shards(model, self.votes) if parallel == "fsdp" else Replicas(model, self.votes)
        return self.ranks


def own_device(name: str | None) -> str | None:
    """The device of this process: its own GPU where several were launched and none is named by number."""
    world = launched_world()
    if world is None or name not in (None, "cuda") or not torch.cuda.is_available():
        return name
    return f"cuda:{world.local_rank}"


@contextmanager
def company(device: str | None) -> Iterator[Processes]:
    """Inside, the processes that were launched together work together; whatever ends one ends all.

    Args:
        device: what the run was asked for; decides how they talk.

    Raises:
        VramfitError: they did not meet.
        RankFailed: another one has stopped.
    """
    world = launched_world()
    if world is None:
        yield Processes()
        return
    named = own_device(device) or "cpu"
    join(world, torch.device("cpu" if named == "emulated" else named))
    votes = RankVotes(world.rank, world.size)
    heartbeat = Heartbeat(world.rank, world.size)
    heartbeat.start()
    try:
        yield Processes(world, votes)
        votes.agree()
        votes.close()
    except BaseException as error:
        votes.give_up(error)
        raise
    finally:
        heartbeat.stop()
        leave()
