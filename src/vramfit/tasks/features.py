"""Features: an encoder without a head; served, it gives the vectors of texts."""

from collections.abc import Sequence
from typing import Any

from vramfit.tasks.base import Task
from vramfit.tasks.parts.encoding import Tokenizing
from vramfit.tasks.parts.reading import Reference


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

    def predictions(
        self, output: Any, batch: Any, references: Sequence[Reference], how: Tokenizing
    ) -> list[dict[str, Any]]:
        """`embedding`: one vector a text."""
        return [{"embedding": vector} for vector in output.embedding.float().tolist()]


TASK = Features()
