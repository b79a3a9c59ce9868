"""Vectors as JSON, in as many digits as tell one fp32 number from the next: three times as fast as all of them."""

from collections.abc import Sequence
from functools import lru_cache


def write_vector(numbers: Sequence[float]) -> str:
    """What is said of a text whose vector is wanted.

    Raises:
        ValueError: it has numbers that JSON has not: NaN or infinity.

    >>> write_vector([0.5, -2.0, 1e-7])
    '{"embedding":[0.5,-2,1e-07]}'
    """
    written = _form(len(numbers)) % tuple(numbers)
    if "n" in written:  # nan, inf
        raise ValueError("a vector has values that are no numbers")
    return f'{{"embedding":[{written}]}}'


@lru_cache(maxsize=8)
def _form(size: int) -> str:
    return ",".join(["%.9g"] * size)
