"""`World`: which process this is, and of how many; made by torchrun, or by whatever sets the same variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from vramfit.errors import VramfitError, WorkloadError

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process, and `accelerate launch` and SageMaker too."""
COLLECTIVE_TIMEOUT_S = 1800.0
"""A rank may read data or save for long; one that is gone is noticed otherwise."""


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
