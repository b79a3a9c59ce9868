"""Runs that took more than was predicted because there was room: the same inside the least a plan would have."""

from typing import Any

OVER = 0.01
"""Of the prediction."""
MIB = 2**20


def is_over(line: dict[str, Any]) -> bool:
    """Whether a run of `vramfit train` that had room for more reserved more than was predicted."""
    run = line.get("run", {})
    if "predicted_reserved_bytes" not in run or line.get("held") or line["remedy"].startswith("planned"):
        return False
    return bool(run["measured_reserved_bytes"] > (1 + OVER) * run["predicted_reserved_bytes"])


def least_bytes(predicted_bytes: int) -> int:
    """The least memory that leaves the planner's usual margin beside a prediction, in whole MiB."""
    from vramfit.planner.heuristics import BASIS_SHARE, LEAST_FOR_LENGTHS, LEAST_SHARE, LENGTHS_SHARE

    share, for_lengths = BASIS_SHARE["verified"], LENGTHS_SHARE["expandable"]
    least = max((predicted_bytes + LEAST_FOR_LENGTHS) / (1 - share), predicted_bytes / (1 - share - for_lengths))
    least = min(least, predicted_bytes / (1 - share - LEAST_SHARE))
    return (int(least) // MIB + 1) * MIB
