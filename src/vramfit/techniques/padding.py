"""Padding: how wide a batch is for its longest sample, and which samples meet in one."""

WIDTH_STEP = 8
WINDOW_BATCHES = 50
"""Samples are sorted by length inside windows of this many batches: like lengths meet, and a batch is still drawn from
the whole data set."""


def padded_width(length: int, widest: int) -> int:
    """Columns for samples of a length: a multiple of 8, but no more than the widest batch there is.

    cuDNN's attention is prepared anew for every width it has not seen, which takes longer than many steps.

    >>> padded_width(33, 66), padded_width(65, 66)
    (40, 66)
    """
    return min(-(-length // WIDTH_STEP) * WIDTH_STEP, widest)
