"""An effective batch shared out among ranks: each gets about as many tokens as any other."""

import heapq
from collections.abc import Sequence


def share_out(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Samples of every rank, by number, in order; the longest are dealt first, each to whoever has fewest tokens.

    No rank has more tokens than the mean and one longest sample. With fewer samples than ranks, some get none.

    >>> share_out([9, 1, 8, 2, 3, 7], 2)
    [[0, 1, 3, 4], [2, 5]]
    """
    ranks = [(0, 0, rank) for rank in range(num_ranks)]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        num_tokens, num_samples, rank = heapq.heappop(ranks)
        shares[rank].append(i)
        heapq.heappush(ranks, (num_tokens + lengths[i], num_samples + 1, rank))
    return [sorted(share) for share in shares]
