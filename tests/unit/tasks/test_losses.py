"""Losses as sums where a head's own mean is over something else than its labels."""

import torch
from transformers import ElectraConfig, ElectraForPreTraining

from vramfit.tasks.parts.losses import head_loss, model_inputs

CONFIG = ElectraConfig(
    vocab_size=50,
    embedding_size=16,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def test_a_discriminator_counts_the_tokens_it_attends_to_whatever_labels_padding_has() -> None:
    torch.manual_seed(0)
    model = ElectraForPreTraining(CONFIG)
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[1, 5:] = 0
    batch = {
        "input_ids": torch.randint(5, 50, (3, 8)),
        "attention_mask": mask,
        "labels": torch.randint(0, 2, (3, 8)),
    }
    loss = head_loss(model, batch)
    mean = loss.sums(model(**model_inputs(batch)), batch)[0] / loss.counts(batch)[0]
    torch.testing.assert_close(mean, model(**batch).loss)
