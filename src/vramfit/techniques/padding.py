"""Padding: how wide a batch is for its longest sample."""

WIDTH_STEP = 8


def padded_width(length: int, widest: int) -> int:
    """Columns for samples of a length: a multiple of 8, but no more than the widest batch there is.

    cuDNN's attention is prepared anew for every width it has not seen, which takes longer than many steps.

    >>> padded_width(33, 66), padded_width(65, 66)
    (40, 66)
    """
    return min(-(-length // WIDTH_STEP) * WIDTH_STEP, widest)
