"""`Segment` and `BlockState`: what the allocator holds at one moment."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vramfit.allocator.pool import Block


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockState:
    """One block of a segment."""

    address: int
    size: int
    requested_bytes: int
    """What was asked for; 0 for a free block."""
    state: Literal["used", "free"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A range of device memory; of an expandable segment, one range without gaps."""

    address: int
    size: int
    stream: int
    small: bool
    blocks: tuple[BlockState, ...]


def take_snapshot(heads: Iterable[Block]) -> list[Segment]:
    """The segments that begin with these blocks, by address."""
    segments = []
    for head in sorted(heads, key=lambda block: block.address):
        run: list[Block] = []
        block: Block | None = head
        while block is not None:
            if block.is_mapped:
                run.append(block)
            elif run:
                segments.append(_segment(run))
                run = []
            block = block.next
        if run:
            segments.append(_segment(run))
    return segments


def _segment(run: list[Block]) -> Segment:
    return Segment(
        address=run[0].address,
        size=sum(block.size for block in run),
        stream=run[0].pool.stream,
        small=run[0].pool.small,
        blocks=tuple(_state(block) for block in run),
    )


def _state(block: Block) -> BlockState:
    return BlockState(
        address=block.address,
        size=block.size,
        requested_bytes=0 if block.is_free else block.requested_bytes,
        state="free" if block.is_free else "used",
    )
