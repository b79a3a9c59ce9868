"""How many scores are asked for beside the best one, and which tasks have them."""

from typing import Any

MOST: dict[str, int] = {"sequence-classification": 1000, "token-classification": 1000, "masked-lm": 100}
"""Tasks that have scores, with the most that are given of one text, word or mask."""


def wrong_top_k(top_k: Any, task: str | None = None) -> str | None:
    """Why so many scores cannot be given; None where they can.

    Args:
        task: of the model, where it is known.

    >>> wrong_top_k(0)
    'top_k 0 is not a whole number from 1'
    >>> wrong_top_k(3, "sequence-classification")
    """
    if type(top_k) is not int or top_k < 1:
        return f"top_k {str(top_k)[:40]} is not a whole number from 1"
    if task is not None and task not in MOST:
        return f"top_k is not for {task}: {', '.join(MOST)} have scores to choose from"
    if task is not None and top_k > MOST[task]:
        return f"top_k {top_k} is more than the {MOST[task]:,} scores that are given for {task}"
    return None
