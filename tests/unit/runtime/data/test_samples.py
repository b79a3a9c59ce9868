"""What a model gets: tokens, masks and labels, cut and padded."""

import copy
import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vramfit.runtime.data.samples import read_samples
from vramfit.runtime.data.source import DataSource
from vramfit.tasks.base import IGNORED
from vramfit.tasks.parts.reading import Tokenizing


def test_samples_are_padded_to_the_longest_of_their_batch(write: Any, read: Any, tokenizer: Any) -> None:
    samples = read(write("a.csv", "text,label\ngood,1\nvery very good film,0\nbad,2\n"))
    assert samples.lengths == [3, 6, 3]
    batch = samples.collate([1, 0])
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]
    assert tokenizer.decode(batch["input_ids"][1].tolist()) == "[CLS] good [SEP] [PAD] [PAD] [PAD]"
    assert batch["labels"].tolist() == [0, 1]
    assert samples.collate([2])["input_ids"].shape == (1, 6)  # a common width, and no more than the longest sample
    assert all(value.dtype == torch.long and value.device.type == "cpu" for value in batch.values())


def test_batches_have_few_widths(write: Any, read: Any) -> None:
    samples = read(write("a.csv", "text,label\n" + "".join(f"{'good ' * n},{n % 2}\n" for n in range(1, 10))))
    assert sorted({samples.collate([i])["input_ids"].shape[1] for i in range(len(samples))}) == [8, 11]
    assert [int(samples.collate([i])["attention_mask"].sum()) for i in range(3)] == [3, 4, 5]


def test_labels_in_order_of_value_or_alphabet_or_as_given(write: Any, read: Any) -> None:
    numbers = write("a.csv", "text,label\na,10\nb,9\nc,-1\n")
    assert read(numbers).label_names == ("-1", "9", "10")
    names = write("b.csv", "text,label\na,pos\nb,neg\n")
    given = read(names, label_names=["pos", "neg", "neutral"])
    assert given.label_names == ("pos", "neg", "neutral")
    assert given.collate([0, 1])["labels"].tolist() == [0, 1]
    by_number = read(write("c.csv", "text,label\na,1\nb,0\n"), label_names=["neg", "pos"])
    assert by_number.collate([0, 1])["labels"].tolist() == [1, 0]
    assert [r["label"] for r in by_number.references] == ["pos", "neg"]


def test_labels_of_a_row_kept_out_make_no_class(write: Any, read: Any) -> None:
    assert read(write("a.csv", "text,label\na,1\n ,2\n"), skip_bad_rows=True).label_names == ("1",)


def test_token_types_only_where_the_model_takes_them(write: Any, read: Any, tokenizer: Any) -> None:
    path = write("a.csv", "sentence1,sentence2,label\na,b,1\n")
    other = copy.copy(tokenizer)
    other.model_input_names = ["input_ids", "attention_mask"]
    assert "token_type_ids" not in read(path, tokenizer=other).collate([0])
    assert "token_type_ids" in read(path).collate([0])


def test_a_row_of_a_hundred_thousand_words_is_cut_and_counted(write: Any, read: Any) -> None:
    samples = read(write("a.csv", f"text,label\n{'good ' * 100_000},1\nbad,0\n"))
    assert samples.lengths == [16, 3]
    assert samples.num_truncated == 1
    assert samples.longest_before_truncation == 100_002


def test_the_first_token_of_a_word_is_labelled(write: Any, read: Any, tokenizer: Any) -> None:
    row = {"tokens": ["Annax", "is", "", "Berlinx"], "tags": ["B-person", "O", "O", "B-place"]}
    samples = read(write("a.jsonl", json.dumps(row)), "token-classification")
    batch = samples.collate([0])
    pieces = tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
    assert pieces == ["[CLS]", "anna", "##x", "is", "berlin", "##x", "[SEP]"]
    assert batch["labels"].tolist() == [[IGNORED, 0, IGNORED, 2, 1, IGNORED, IGNORED]]
    assert list(samples.references[0]["first"]) == [1, 3, -1, 4]


def other_tokenizer(pieces: Any, marks: str) -> Any:
    """A tokenizer whose tokens carry the space before them, as those of RoBERTa and XLM-R do."""
    model = Tokenizer(models.BPE(unk_token="<unk>"))
    model.pre_tokenizer = pieces
    alphabet = pre_tokenizers.ByteLevel.alphabet() if marks == "Ġ" else []
    special = ["<s>", "</s>", "<pad>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    model.train_from_iterator(["anna is in berlin"] * 9, trainer)
    names = {
        "cls_token": "<s>",
        "sep_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }
    return PreTrainedTokenizerFast(tokenizer_object=model, **names)


@pytest.mark.parametrize(
    ("pieces", "mark"), [(pre_tokenizers.ByteLevel(add_prefix_space=False), "Ġ"), (pre_tokenizers.Metaspace(), "▁")]
)
def test_words_are_found_whether_or_not_a_token_has_the_space_before_it(write: Any, pieces: Any, mark: str) -> None:
    other = other_tokenizer(pieces, mark)
    row = {"tokens": ["anna", "is", "berlinz", "in"], "tags": ["B-person", "O", "B-place", "O"]}
    source = DataSource(path=write("a.jsonl", json.dumps(row)), task="token-classification")
    samples = read_samples(source, Tokenizing(tokenizer=other, max_length=32))
    first = samples.references[0]["first"]
    tokens = other.convert_ids_to_tokens(samples.collate([0])["input_ids"][0].tolist())
    begun = [tokens[place].removeprefix(mark) for place in first]
    assert all(word.startswith(start) for word, start in zip(row["tokens"], begun, strict=True))
    assert all(tokens[place].startswith(mark) for place in list(first)[1:])


def test_words_beyond_the_cut_have_no_token(write: Any, read: Any) -> None:
    row = {"tokens": ["good"] * 5, "tags": ["O"] * 5}
    samples = read(write("a.jsonl", json.dumps(row)), "token-classification", max_length=5)
    assert list(samples.references[0]["first"]) == [1, 2, 3, -1, -1]
    assert samples.num_truncated == 1


def question(context: str, answer: str, **more: Any) -> str:
    return json.dumps({"question": "where is anna", "context": context, "answers": [answer]} | more)


def test_a_long_context_comes_in_windows_that_overlap(write: Any, read: Any, tokenizer: Any) -> None:
    context = "a b c d e f good bad film very berlin a b c d"
    samples = read(write("a.jsonl", question(context, "berlin")), "question-answering", max_length=12, stride=2)
    assert len(samples) == 4  # 6 tokens of context a window, 4 new ones each
    assert samples.num_truncated == 1
    assert samples.longest_before_truncation == 3 + 3 + 15
    batch = samples.collate(range(4))
    assert batch["start_positions"].tolist() == [0, 0, 7, 0]
    assert batch["input_ids"][2, 7] == tokenizer.convert_tokens_to_ids("berlin")
    shared = samples.references[0]["offsets"][-4:], samples.references[1]["offsets"][:4]
    assert list(shared[0]) == list(shared[1])


def test_a_very_long_question_and_context_stay_bounded(write: Any, read: Any) -> None:
    row = {"question": "where " * 5000, "context": "good " * 5000 + "berlin", "answers": ["berlin"]}
    samples = read(write("a.jsonl", json.dumps(row)), "question-answering", max_length=64)
    assert max(samples.lengths) == 64
    assert len(samples) < 8 * 5001 / 64 + 2
    assert (samples.collate([len(samples) - 1])["start_positions"] > 0).all()


def test_an_answer_is_looked_for_near_its_place(write: Any, read: Any) -> None:
    answers = [{"text": "anna", "answer_start": 12}]
    row = {"question": "a", "context": "anna is in anna", "answers": answers}
    samples = read(write("a.jsonl", json.dumps(row)), "question-answering")
    assert samples.references[0]["answer_at"] == (11, 15)
    assert samples.collate([0])["start_positions"].tolist() == [6]


def test_masks_depend_on_seed_epoch_and_sample_alone(write: Any, read: Any, tokenizer: Any) -> None:
    path = write("a.txt", "a b c d e f good bad film very\n" * 40)
    samples = read(path, "masked-lm")
    together, alone = samples.collate(range(40)), samples.collate([7])
    assert torch.equal(together["input_ids"][7:8], alone["input_ids"])
    assert torch.equal(together["labels"][7:8], alone["labels"])
    assert not torch.equal(together["labels"], samples.collate(range(40), epoch=1)["labels"])
    assert not torch.equal(together["labels"], read(path, "masked-lm", seed=1).collate(range(40))["labels"])
    chosen = together["labels"] != IGNORED
    assert chosen.any(dim=1).all()
    assert 0.1 < chosen.float().mean() < 0.2
    masked = together["input_ids"][chosen] == tokenizer.mask_token_id
    assert 0.6 < masked.float().mean() < 0.95


def test_special_tokens_and_padding_are_never_masked(write: Any, read: Any) -> None:
    batch = read(write("a.txt", "a\na b c d e f\n"), "masked-lm", mask_probability=1.0).collate([0, 1])
    chosen = batch["labels"] != IGNORED
    assert chosen.tolist() == [[False, True] + [False] * 6, [False] + [True] * 6 + [False]]


def test_masked_texts_are_left_alone_for_prediction(write: Any, read: Any, tokenizer: Any) -> None:
    batch = read(write("a.txt", "good [MASK]\n"), "masked-lm", needs_labels=False).collate([0])
    assert "labels" not in batch
    assert tokenizer.mask_token_id in batch["input_ids"]


def test_the_fingerprint_changes_with_what_a_model_sees(write: Any, read: Any) -> None:
    first = read(write("a.csv", "text,label\na,1\nb,0\n"))
    assert read(write("b.csv", "label,text,id\n1,a,7\n0,b,8\n")).fingerprint == first.fingerprint
    assert read(write("c.csv", "text,label\na,1\nc,0\n")).fingerprint != first.fingerprint
    assert read(write("d.csv", "text,label\na,1\nb,1\n"), label_names=["0", "1"]).fingerprint != first.fingerprint
    assert read(write("e.csv", "text,label\na,1\nb,0\n"), max_rows=1).fingerprint != first.fingerprint
