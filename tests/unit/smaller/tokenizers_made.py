"""Small multilingual tokenizers of every kind, trained on the spot, and models of random weights that go with them."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaModel,
)

ENGLISH = [
    "the weather in the north was cold and windy this morning",
    "she reads the newspaper while the children play outside",
    "where is the nearest station, and when does the train leave?",
    "the committee postponed its decision until the budget was reviewed",
    "a snowman ☃ and a naïve façade",
]
OTHERS = [
    "das wetter im norden war heute morgen kalt und windig",
    "sie liest die zeitung, während die kinder draußen spielen",
    "ο καιρός στα βόρεια ήταν κρύος σήμερα το πρωί",
    "где находится ближайшая станция и когда отходит поезд",
    "今天早上北方的天气很冷风很大",
    "委员会推迟了决定",
]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 66,
    "initializer_range": 0.2,
}


def _wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    _train(made, trainers.WordPieceTrainer(vocab_size=400, special_tokens=BERT, show_progress=False))
    around = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", around)
    return made


def _byte_bpe() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(
        made,
        trainers.BpeTrainer(vocab_size=500, special_tokens=ROBERTA[:4], initial_alphabet=alphabet, show_progress=False),
    )
    made.add_special_tokens(["<mask>"])
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return made


def _unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    _train(
        made,
        trainers.UnigramTrainer(vocab_size=300, special_tokens=ROBERTA[:4], unk_token="<unk>", show_progress=False),
    )
    made.add_special_tokens(["<mask>"])
    made.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> </s> $B </s>", [("<s>", 0), ("</s>", 2)]
    )
    return made


def _train(made: Tokenizer, trainer: Any) -> None:
    made.train_from_iterator([*ENGLISH, *OTHERS] * 20, trainer)


KINDS = {
    "wordpiece": (_wordpiece, BertConfig, BertModel, BERT),
    "wordpiece masked-lm": (_wordpiece, BertConfig, BertForMaskedLM, BERT),
    "byte-level bpe": (_byte_bpe, RobertaConfig, RobertaForSequenceClassification, ROBERTA),
    "byte-level bpe masked-lm": (_byte_bpe, RobertaConfig, RobertaForMaskedLM, ROBERTA),
    "unigram": (_unigram, XLMRobertaConfig, XLMRobertaModel, ROBERTA),
}


def write_multilingual(folder: Path, kind: str, *more: str) -> Path:
    """A folder with a tokenizer of a kind and a model of random weights.

    Args:
        more: tokens to add to the vocabulary of a WordPiece.
    """
    make, config_class, model_class, names = KINDS[kind]
    made = make()
    if more:
        data = json.loads(made.to_str())
        data["model"]["vocab"] |= {token: len(data["model"]["vocab"]) + i for i, token in enumerate(more)}
        made = Tokenizer.from_str(json.dumps(data))
    roles = ("pad", "unk", "cls", "sep", "mask") if names is BERT else ("cls", "pad", "sep", "unk", "mask")
    special = {f"{role}_token": name for role, name in zip(roles, names, strict=True)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **special)
    torch.manual_seed(3)
    config = config_class(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        **SIZES,
    )
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_corpus(path: Path) -> Path:
    """The English rows."""
    path.write_text("\n".join(ENGLISH) + "\n", encoding="utf-8")
    return path
