"""How long a matrix product takes: tiles over multiprocessors, in whole waves."""

TILE = 128
"""Rows and columns of the piece of the result that a thread block computes; cuBLAS's large kernels take 128 × 128
to 128 × 256, and smaller ones lose about what they save in waves."""
MAX_SPLITS = 8
MIN_SPLIT_K = 256
"""Few tiles with a long inner dimension are split along it (split-K): the gradients of weights."""


def product_share(product: tuple[int, int, int, int], num_multiprocessors: int) -> float:
    """The share of a GPU's rate that a product of this shape can have: edges of tiles and the last wave are lost.

    Args:
        product: count, m, n and k.
        num_multiprocessors: of the GPU.

    >>> product_share((1, 8192, 8192, 8192), 128), product_share((1, 128, 128, 64), 128)
    (1.0, 0.0078125)
    """
    count, m, n, k = product
    if not count * m * n * k:
        return 1.0
    num_tiles = count * -(-m // TILE) * -(-n // TILE)
    useful = count * m * n / (num_tiles * TILE * TILE)
    num_splits, best = 1, 0.0
    while num_splits <= MAX_SPLITS and (num_splits == 1 or k >= num_splits * MIN_SPLIT_K):
        num_units = num_tiles * num_splits
        num_waves = -(-num_units // num_multiprocessors)
        best = max(best, num_units / (num_waves * num_multiprocessors))
        num_splits *= 2
    return useful * best
