"""Small models of every family with every head, and batches of uneven lengths and label counts."""

from typing import Any

import torch

from vramfit.step.plain import Batch
from vramfit.tasks.parts.pooling import EmbeddingHead, attach

VOCABULARY = 99
LENGTH = 16
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": 0.0,
    "num_labels": 3,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"pad_token_id": 1},
    "distilbert": {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 48,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
        "qa_dropout": 0.0,
    },
    "albert": {"embedding_size": 16, "classifier_dropout_prob": 0.0},
    "electra": {"embedding_size": 16, "summary_last_dropout": 0.0},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "cls_dropout": 0.0,
    },
    "modernbert": {
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "attention_dropout": 0.0,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
HEADS = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "masked-lm": "AutoModelForMaskedLM",
}


def make_model(family: str, task: str, **changes: Any) -> torch.nn.Module:
    """A small random model in training mode, without dropout."""
    import transformers

    labels = {"num_labels": 2} if task == "question-answering" else {}
    config = transformers.AutoConfig.for_model(family, **(COMMON | FAMILIES[family] | labels | changes))
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, HEADS.get(task, "AutoModel")).from_config(config)
    if task == "embedding":
        attach(model, EmbeddingHead())
    return model.train()


def make_batch(task: str, size: int = 12, seed: int = 1) -> Batch:
    """Samples of 3 to 16 tokens; some labels are ignored, unevenly."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, LENGTH + 1, (size,), generator=draw)
    lengths[0] = LENGTH
    mask = (torch.arange(LENGTH)[None] < lengths[:, None]).long()
    ids = torch.randint(5, VOCABULARY, (size, LENGTH), generator=draw) * mask
    batch = {"input_ids": ids, "attention_mask": mask}
    if task == "embedding":
        return batch | {"text_rows": torch.arange(size), "text_ids": torch.arange(size)}
    if task == "sequence-classification":
        return batch | {"labels": torch.randint(0, 3, (size,), generator=draw)}
    if task == "question-answering":
        starts = torch.randint(0, 3, (size,), generator=draw)
        ends = starts + 1
        starts[1], ends[2], ends[3] = 500, 500, 500  # beyond the text: ignored, not equally often
        return batch | {"start_positions": starts, "end_positions": ends}
    classes = VOCABULARY if task == "masked-lm" else 3
    labels = torch.randint(0, classes, (size, LENGTH), generator=draw)
    kept = (torch.rand(size, LENGTH, generator=draw) < 0.4).long() * mask
    kept[2] = 0  # a sample without any label
    kept[0, 0] = 1
    return batch | {"labels": torch.where(kept.bool(), labels, torch.tensor(-100))}


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    """All gradients in one vector; zeros where there is none."""
    return torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in model.parameters()])


def flat_weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
