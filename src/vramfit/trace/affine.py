"""Sizes as functions of the batch: a trace is made at one odd batch, and read back for any other.

Every dimension of every tensor in a step is `k · batch + c`. Tracing with a batch that is a large prime
makes k and c readable from the number itself: nothing else in a model is a multiple of that prime.
"""

PROBE_BATCH = 2**31 - 1
"""A Mersenne prime: far above any other dimension, and small enough that byte counts stay below 2**63."""

Affine = tuple[int, int]
"""(k, c): k · batch + c."""

Polynomial = tuple[int, ...]
"""Coefficients of 1, batch, batch², …"""


def split(n: int, probe: int | None) -> Affine:
    """k and c of a number seen in a trace at batch `probe`; a trace at a real batch has only constants.

    >>> split(3 * PROBE_BATCH + 1, PROBE_BATCH), split(768, PROBE_BATCH), split(96, None)
    ((3, 1), (0, 768), (0, 96))
    """
    if probe is None:
        return 0, n
    k, c = divmod(n, probe)
    return (k + 1, c - probe) if c > probe // 2 else (k, c)


def at(size: Affine, batch: int) -> int:
    """The number at a real batch."""
    return size[0] * batch + size[1]


def product(sizes: tuple[Affine, ...], factor: int = 1) -> Polynomial:
    """The polynomial of a product of dimensions, times a constant."""
    result = [factor]
    for k, c in sizes:
        if k == 0:
            result = [x * c for x in result]
        else:
            longer = [0] * (len(result) + 1)
            for i, x in enumerate(result):
                longer[i] += x * c
                longer[i + 1] += x * k
            result = longer
    return tuple(result)


def evaluate(polynomial: Polynomial, batch: int) -> int:
    """Its value at a real batch."""
    result = 0
    for coefficient in reversed(polynomial):
        result = result * batch + coefficient
    return result
