"""`trim`: a model whose vocabulary is what a corpus uses; tokenizer, embeddings and configuration stay consistent."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from vramfit.errors import CheckpointError, VramfitError
from vramfit.models.anatomy import backbone, vocab_size
from vramfit.models.tokenizers import load_tokenizer
from vramfit.runtime.trained import TrainedModel
from vramfit.smaller.folder import fresh_folder
from vramfit.smaller.rows import Answers, Rows, answers, difference, encoded, make_samples
from vramfit.smaller.sizes import sizes_of
from vramfit.smaller.source import Reduced, Reduction, load_whole, write_as_saved
from vramfit.smaller.vocabulary import Trimmed, Vocabulary
from vramfit.stages import tell
from vramfit.tasks.parts.reading import Reference, texts_of

MAX_DIFFERENCE = 1e-5
"""Between the answers of the model and of the trimmed one, on rows of the corpus."""
NUM_COMPARED = 32
"""Rows whose answers are compared; the tokens are compared on all."""
COMPARED_BATCH = 8
MOST_ROUNDS = 5
"""Times that more tokens are kept because a row was segmented otherwise."""
NAMES_OF_TOKENS = ("_token_id", "_token_ids", "_token_index")
"""How fields of a configuration end that hold ids of tokens."""
OTHER_FILES = ("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "spm.model", "sentencepiece.bpe.model")
"""Files that hold the vocabulary in other forms; `tokenizer.json` is the one that is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrimReport(Reduced):
    """What came of it."""

    num_compared: int
    """Rows whose answers were compared."""


def trim(request: Reduction) -> TrimReport:
    """Write a model that has only the tokens that a corpus uses, with all special tokens, bytes and characters.

    Raises:
        DataError: data that cannot be read, or has no texts.
        CheckpointError, UnknownModel: no model or tokenizer there, or one that cannot be trimmed.
        VramfitError: the output is there already, or the trimmed model gives other answers.
    """
    trained, rows = request.open()
    vocabulary = Vocabulary(json.loads(trained.tokenizer.backend_tokenizer.to_str()))
    trimmed, num_rows = _trimmed(trained, rows, vocabulary)
    compared = rows.first(NUM_COMPARED)
    with fresh_folder(request.output) as folder:
        model = load_whole(trained)
        before = sizes_of(trained, model)
        expected = _answers(model, trained, compared)
        keep_rows(model, trimmed)
        write_as_saved(model, trained, folder)
        write_tokenizer(folder, trimmed)
        smaller = replace(trained, model=str(folder), tokenizer=load_tokenizer(folder))
        model = load_whole(smaller)
        found = max(
            difference(_kept_columns(a, trimmed.kept, before.vocabulary), b)
            for a, b in zip(expected, _answers(model, smaller, compared), strict=True)
        )
        if not found <= MAX_DIFFERENCE:
            raise VramfitError(
                f"the trimmed model gives other answers: they differ by up to {found:.3g} on {len(compared)} rows",
                hint="nothing was written; please report the family and the tokenizer: this is a bug in vramfit",
            )
        after = sizes_of(smaller, model)
    return TrimReport(
        model=trained.model,
        output=str(request.output),
        num_rows=num_rows,
        num_compared=len(compared),
        max_difference=found,
        before=before,
        after=after,
    )


def _trimmed(trained: TrainedModel, rows: Rows, vocabulary: Vocabulary) -> tuple[Trimmed, int]:
    """The vocabulary of some rows, with as many more tokens as it takes for every row to be segmented as before."""
    used = set(trained.tokenizer.all_special_ids)
    num_rows = 0
    for chunk in rows.chunks():
        used.update(i for one in encoded(chunk, trained.tokenizing, trained.task) for i in one.ids)
        num_rows += len(chunk)
        tell(f"{num_rows:,} rows read, {len(used):,} tokens used")
    for _ in range(MOST_ROUNDS):
        trimmed = vocabulary.trimmed(vocabulary.needed(used), trained.tokenizer.pad_token_id)
        tell(f"comparing the tokens of {num_rows:,} rows")
        lost = _lost(trained, rows, trimmed)
        if not lost:
            return trimmed, num_rows
        used |= vocabulary.parts_of(_words(trained.tokenizer.backend_tokenizer, lost))
    raise VramfitError(
        f"{len(lost)} rows are still segmented otherwise after {MOST_ROUNDS} rounds, the first: {lost[0][:80]!r}",
        hint="nothing was written; please report the tokenizer: this is a bug in vramfit",
    )


def _lost(trained: TrainedModel, rows: Rows, trimmed: Trimmed) -> list[str]:
    """Texts that the trimmed tokenizer segments otherwise, a chunk of them at most."""
    with TemporaryDirectory() as folder:
        trained.tokenizer.save_pretrained(folder)
        write_tokenizer(Path(folder), trimmed)
        shorter = replace(trained.tokenizing, tokenizer=load_tokenizer(folder))
    new = trimmed.new_ids
    for chunk in rows.chunks():
        old = encoded(chunk, trained.tokenizing, trained.task)
        pairs = zip(old, encoded(chunk, shorter, trained.task), strict=True)
        differ = [a.reference for a, b in pairs if [new[i] for i in a.ids] != list(b.ids)]
        if differ:
            return [text for reference in differ for text in texts_of(reference)]
    return []


def _words(backend: Any, texts: Sequence[str]) -> set[str]:
    """What the model of a tokenizer is asked to segment."""
    found = set()
    for text in texts:
        plain = backend.normalizer.normalize_str(text) if backend.normalizer is not None else text
        cut = backend.pre_tokenizer.pre_tokenize_str(plain) if backend.pre_tokenizer is not None else [(plain, None)]
        found |= {word for word, _ in cut}
    return found


def keep_rows(model: Any, trimmed: Trimmed) -> None:
    """Leave a model the rows of its tables that belong to kept tokens, in place; its configuration follows.

    Raises:
        CheckpointError: the model has no table with a row for each token.
    """
    words, size = backbone(model).get_input_embeddings(), vocab_size(model)  # type: ignore[operator]
    if size is None or size <= max(trimmed.kept):
        raise CheckpointError(
            f"the tokenizer knows {max(trimmed.kept) + 1:,} tokens and the model's embedding has {size or 0:,} rows",
            hint="take the tokenizer that the model was trained with",
        )
    index = torch.tensor(trimmed.kept)
    output = getattr(model, "get_output_embeddings", lambda: None)()
    tables = [words.weight, *(output.parameters() if output is not None else ())]
    if output is not None:  # some heads keep the bias of their last layer beside it
        inside = {id(p) for p in backbone(model).parameters()}
        tables += [p for p in model.parameters() if id(p) not in inside and p.shape == (size,)]
    new = {id(p): torch.nn.Parameter(p.detach()[index].clone(), requires_grad=False) for p in tables}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if id(parameter) in new:
                module._parameters[name] = new[id(parameter)]
    words.num_embeddings = len(index)
    if getattr(words, "padding_idx", None) is not None:
        words.padding_idx = trimmed.new_ids.get(words.padding_idx)
    if output is not None and hasattr(output, "out_features"):
        output.out_features = len(index)
    for config in (model.config, getattr(model, "generation_config", None)):
        if config is not None:
            _renumber(config, trimmed.new_ids)
    model.config.vocab_size = len(index)


def _renumber(config: Any, new: Mapping[int, int]) -> None:
    """Give the special tokens that a configuration names their new numbers."""
    for name, value in list(vars(config).items()):
        if name.endswith(NAMES_OF_TOKENS) and isinstance(value, int):
            setattr(config, name, new.get(value))
        elif name.endswith(NAMES_OF_TOKENS) and isinstance(value, list):
            setattr(config, name, [new[i] for i in value if i in new])


def write_tokenizer(folder: Path, trimmed: Trimmed) -> None:
    """Put a trimmed vocabulary in the place of the one that a folder has."""
    (folder / "tokenizer.json").write_text(json.dumps(trimmed.data, ensure_ascii=False), encoding="utf-8")
    for name in OTHER_FILES:
        (folder / name).unlink(missing_ok=True)
    settings = folder / "tokenizer_config.json"
    said = json.loads(settings.read_text(encoding="utf-8"))
    if said.pop("added_tokens_decoder", None) is not None:
        said["added_tokens_decoder"] = {
            str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in trimmed.data["added_tokens"]
        }
    settings.write_text(json.dumps(said, indent=2, ensure_ascii=False), encoding="utf-8")


def _answers(model: Any, trained: TrainedModel, rows: list[Reference]) -> list[Answers]:
    return list(answers(model, make_samples(rows, trained), COMPARED_BATCH))


def _kept_columns(found: Answers, kept: Sequence[int], size: int) -> Answers:
    """Answers without the numbers of tokens that were removed, where a model gives one for each token."""
    index = torch.tensor(kept)
    return {name: value[..., index] if value.shape[-1] == size else value for name, value in found.items()}
