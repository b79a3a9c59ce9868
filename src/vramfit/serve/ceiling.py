"""`Ceiling`: how many tokens a batch may have: lowered where memory runs out, raised again when it has not for long."""

CLEAN_RUNS = 20
"""So many rounds without running out, and twice as much is tried."""


class Ceiling:
    """The tokens of a batch.

    >>> ceiling = Ceiling(800)
    >>> ceiling.note(200)
    >>> ceiling.num_tokens
    200
    """

    def __init__(self, planned: int) -> None:
        self.num_tokens = planned
        self._planned = planned
        self._num_clean = 0

    def note(self, num_tokens: int) -> None:
        """What a round ended with; less than it began with where memory ran out."""
        if num_tokens < self.num_tokens:
            self.num_tokens, self._num_clean = num_tokens, 0
            return
        self._num_clean += 1
        if self._num_clean >= CLEAN_RUNS and self.num_tokens < self._planned:
            self.num_tokens, self._num_clean = min(2 * self.num_tokens, self._planned), 0
