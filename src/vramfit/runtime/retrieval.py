"""A model's vectors as a search: queries and documents through the model, and where relevant documents are found."""

from collections.abc import Sequence
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.runtime.data.collection import Collection
from vramfit.runtime.data.samples import Samples
from vramfit.runtime.device import RunDevice
from vramfit.runtime.inference import Inference, OnProgress
from vramfit.runtime.trained import TrainedModel
from vramfit.tasks.parts import vector_metrics
from vramfit.tasks.parts.joint import width_of
from vramfit.tasks.parts.pooling import head_of


class Search:
    """The texts of a collection, tokenized.

    Args:
        trained: whose vectors are asked for.
        collection: what is searched, and what is to be found.
    """

    def __init__(self, trained: TrainedModel, collection: Collection) -> None:
        self._collection = collection
        how = trained.tokenizing
        self.queries = Samples(trained.task, trained.kind.encode(collection.queries, how), how)
        self.documents = Samples(trained.task, trained.kind.encode(collection.documents, how), how)

    @property
    def longest(self) -> Samples:
        """Those with the longest text."""
        return max(self.queries, self.documents, key=lambda samples: max(samples.lengths))

    def figures(
        self, inference: Inference, run_device: RunDevice, dims: Sequence[int], on_progress: OnProgress
    ) -> dict[str, Any]:
        """nDCG, MRR, recall and MAP; `dims`: the same for vectors cut to some lengths.

        Raises:
            WorkloadError: a length beyond that of the vectors.
        """
        check_dims(inference.model, dims)
        rows = self._collection.relevant
        relevant = vector_metrics.Relevant(
            queries=torch.tensor([row[0] for row in rows]),
            documents=torch.tensor([row[1] for row in rows]),
            grades=torch.tensor([row[2] for row in rows], dtype=torch.double),
            num_queries=len(self._collection.queries),
        )

        def found(vectors: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
            with run_device.active():
                ranks = vector_metrics.ranks_of(*vectors, relevant, device=run_device.device)
            return vector_metrics.retrieval_scores(ranks, relevant)

        made = tuple(_vectors(inference, samples, on_progress) for samples in (self.queries, self.documents))
        return vector_metrics.at_dims(made, found, dims)


def check_dims(model: torch.nn.Module, dims: Sequence[int]) -> None:
    """Raises WorkloadError for vectors that are to be cut to more than they have."""
    head = head_of(model)
    width = 0 if head is None else width_of(head, model)
    beyond = [dim for dim in dims if dim > width]
    if beyond:
        raise WorkloadError([f"dims {beyond[0]} is more than the {width} numbers of a vector"])


def _vectors(inference: Inference, samples: Samples, on_progress: OnProgress) -> torch.Tensor:
    """One for each text, on the host."""
    found: list[torch.Tensor] = []
    order: list[int] = []

    def take(output: Any, batch: Any, rows: list[int]) -> None:
        found.append(output.embedding.float().cpu())
        order.extend(rows)

    inference.run(samples, take, on_progress)
    vectors = torch.cat(found)
    return torch.empty_like(vectors).index_copy_(0, torch.tensor(order), vectors)
