"""Our verdict on names is transformers' own: what `from_pretrained` calls missing, unexpected and mismatched."""

import logging
from pathlib import Path
from typing import Any

import pytest
import transformers

from vramfit.checkpoints.inspection import inspect_checkpoint
from vramfit.tasks import find_task

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
    "pad_token_id": 0,
}
SPECIAL = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1},
    "camembert": {"pad_token_id": 1},
    "distilbert": {},
    "electra": {"embedding_size": 8},
    "albert": {"embedding_size": 8},
    "deberta-v2": {},
    "mpnet": {"pad_token_id": 1},
    "modernbert": SPECIAL,
    "nomic_bert": {},
}


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


PAIRS = (
    ("features", "sequence-classification"),
    ("masked-lm", "token-classification"),
    ("sequence-classification", "features"),
    ("pretraining", "masked-lm"),
)
WITHOUT_PRETRAINING = ("modernbert", "nomic_bert")
CASES = [
    (family, saved, wanted)
    for family in FAMILIES
    for saved, wanted in PAIRS
    if saved != "pretraining" or family not in WITHOUT_PRETRAINING
]


@pytest.mark.parametrize(("family", "saved", "wanted"), CASES)
def test_missing_and_unexpected_names_are_those_of_transformers(
    family: str, saved: str, wanted: str, tmp_path: Path
) -> None:
    config = transformers.AutoConfig.for_model(family, **SMALL | FAMILIES[family])
    getattr(transformers, find_task(saved).auto_class).from_config(config).save_pretrained(tmp_path)
    _, theirs = getattr(transformers, find_task(wanted).auto_class).from_pretrained(tmp_path, output_loading_info=True)
    ours = inspect_checkpoint(tmp_path, task=wanted)
    assert set(ours.missing) == set(theirs["missing_keys"])
    assert len(ours.unexpected) == len(theirs["unexpected_keys"])
    assert len(ours.mismatched) == len(theirs["mismatched_keys"]) == 0
    assert not ours.fatal
    assert not [f for f in ours.findings if f.check == "weights.unexpected"]


def test_mismatched_shapes_are_those_of_transformers(folder: Path) -> None:
    _, theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=5, ignore_mismatched_sizes=True, output_loading_info=True
    )
    ours = inspect_checkpoint(folder, num_labels=5)
    assert {m.name for m in ours.mismatched} == {name for name, *_ in theirs["mismatched_keys"]}


def test_weights_that_transformers_splits_are_told_apart(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("nomic_bert", **SMALL)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path, task="features")
    assert found.missing == ()
    assert not set(found.converted) & set(found.targets)
    assert len(found.converted) + len(found.targets) == len(found.entries)
