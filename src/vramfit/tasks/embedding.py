"""Sentence embedding: a vector for a text, learned from texts that belong together and texts that do not."""

from typing import Any

from vramfit.tasks.base import References, Rows, Task, zeros
from vramfit.tasks.parts.reading import Tokenizing
from vramfit.tasks.parts.sentence_head import HeadParts, make_head


class Embedding(Task):
    """See the module."""

    name = "embedding"
    title = "Sentence embedding"
    rank = 70
    auto_class = "AutoModel"
    has_head = False
    is_served = True
    gives_vectors = True
    pools_itself = True
    labels = ("text_rows", "text_ids", "labels")
    texts_per_sample = 2

    def finish_model(self, model: Any, parts: HeadParts | None) -> None:
        from vramfit.tasks.parts import pooling

        pooling.attach(model, make_head(parts or HeadParts(), getattr(model.config, "hidden_size", None)))

    def meta_labels(self, model: Any, batch: int, seq: int, device: Any) -> Any:
        import torch

        from vramfit.tasks.parts import contrastive, pooling

        head = pooling.head_of(model)
        labels = {"text_rows": zeros(device, batch), "text_ids": zeros(device, batch)}
        num_scores = 0 if head is None else contrastive.num_scores(head.contrast)
        return labels | ({"labels": torch.zeros(batch, num_scores, device=device)} if num_scores else {})

    def loss(self, model: Any, batch: Any) -> Any:
        from vramfit.tasks.parts import joint, pooling

        head = pooling.head_of(model)
        return None if head is None or "text_rows" not in batch else joint.loss_of_texts(head, model, batch)

    def numbers_per_sample(self, num_labels: int, seq: int, vocab_size: int) -> tuple[int, int]:
        return 0, 0

    def predictions(self, output: Any, batch: Any, references: References, how: Tokenizing) -> Rows:
        """`embedding`: one vector a text."""
        return [{"embedding": vector} for vector in output.embedding.float().tolist()]


TASK = Embedding()
