"""`MicroBatchSize`: halved when memory runs out, grown again after a quiet time, more patiently each time."""

from typing import Any

FIRST_PATIENCE = 50
"""Windows without trouble before a shrunken micro-batch grows again; doubled whenever growing fails."""


class MicroBatchSize:
    """Samples of full length that one forward pass sees, now and at most.

    >>> size = MicroBatchSize(8)
    >>> size.shrink()
    >>> size.now
    4
    """

    def __init__(self, allowed: int) -> None:
        self.now = allowed
        self._allowed = allowed
        self._patience = FIRST_PATIENCE
        self._num_quiet = 0

    def quiet(self) -> None:
        """A window went through."""
        self._num_quiet += 1

    def trouble(self) -> None:
        """A window did not."""
        self._num_quiet = 0

    def shrink(self) -> None:
        """Half of it; one sample stays one."""
        if self.now < self._allowed:
            self._patience *= 2
        self.now = max(1, self.now // 2)

    def grow(self) -> None:
        """After a quiet time, twice as many."""
        if self.now < self._allowed and self._num_quiet >= self._patience:
            self.now = min(2 * self.now, self._allowed)
            self._num_quiet = 0

    def state_dict(self) -> dict[str, Any]:
        """For a resumed run."""
        return {"now": self.now, "patience": self._patience, "num_quiet": self._num_quiet}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a `state_dict` was taken."""
        self.now, self._patience, self._num_quiet = state["now"], state["patience"], state["num_quiet"]
