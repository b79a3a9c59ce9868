"""Features: an encoder without a head; served, it gives the vectors of texts."""

from typing import Any

from vramfit.tasks.base import References, Rows, Task
from vramfit.tasks.parts.reading import Tokenizing


class Features(Task):
    """See the module."""

    name = "features"
    title = "Features only"
    rank = 60
    auto_class = "AutoModel"
    has_head = False
    is_served = True
    why_no_loss = (
        "task features gives vectors and has no loss to train on: take the task of the head that is to learn, "
        "mode infer, or in Python an nn.Module with a loss of its own"
    )
    gives_vectors = True
    labels = ()

    def predictions(self, output: Any, batch: Any, references: References, how: Tokenizing) -> Rows:
        """`embedding`: one vector a text."""
        return [{"embedding": vector} for vector in output.embedding.float().tolist()]


TASK = Features()
