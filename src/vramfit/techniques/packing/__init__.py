"""Packing: the sequences of a micro-batch lie end to end in one row, so that padding takes neither time nor memory.

The model is that of transformers, unchanged: its attention is told through the attention interface where sequences
begin (`attention`), and hooks see to what looks at a sequence as a whole: the first token, the answer's place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from vramfit.errors import WorkloadError
from vramfit.models.anatomy import backbone, embeddings
from vramfit.models.configuration import padding_id, pools_last_token, supported_attention
from vramfit.tasks import find_task
from vramfit.tasks.base import IGNORED, PER_TOKEN
from vramfit.tasks.parts.losses import PLACES, TARGETS, attended
from vramfit.techniques.packing.attention import IMPLEMENTATION, IN_ROWS, register

ROW_TOKENS, NUM_SIZES = 512, 32
"""Rows have a multiple of so many tokens, or of such a part of the longest: one is filled up by a percent or two."""
ROW_SEQUENCES = 32
"""And a multiple of so many sequences, as far as there are tokens for them."""
FILLED = frozenset({"input_ids", "attention_mask", "token_type_ids", "labels"})
"""What a batch may have beside for its rows to be filled up."""


def row_tokens(num_tokens: int, max_tokens: int, least: int = 0) -> int:
    """Tokens of the row that so many real ones go into.

    >>> row_tokens(18_350, 20_480), row_tokens(20_400, 20_400), row_tokens(300, 20_480, least=10_240)
    (18560, 20400, 10240)
    """
    each = max(ROW_TOKENS, -(-max_tokens // NUM_SIZES))
    return min(max(-(-num_tokens // each) * each, least), max_tokens)


def row_sequences(num_sequences: int, num_more: int, longest: int) -> int:
    """Sequences of a row that is filled up with so many tokens, in sequences of one token at the least.

    >>> row_sequences(64, 82, 512), row_sequences(64, 3, 512), row_sequences(64, 0, 512)
    (96, 67, 64)
    """
    fewest = num_sequences + -(-num_more // longest)
    return min(-(-fewest // ROW_SEQUENCES) * ROW_SEQUENCES, num_sequences + num_more)


def row_size(num_tokens: int, num_sequences: int, max_tokens: int, longest: int, least: int = 0) -> int:
    """Tokens of the row that so many sequences go into: of the next size where this one has no room for as many as are
    wanted, since every other number of them would be a graph of its own.

    >>> row_size(18_350, 64, 20_480, 512), row_size(18_557, 64, 20_480, 512), row_size(20_479, 64, 20_480, 512)
    (18560, 19200, 20480)
    """
    size = row_tokens(num_tokens, max_tokens, least)
    if row_sequences(num_sequences, size - num_tokens, longest) % ROW_SEQUENCES:
        size = row_tokens(size + 1, max_tokens, least)
    return size


def fill_up(packed: dict[str, Any], model: torch.nn.Module, num_tokens: int, longest: int) -> dict[str, Any]:
    """What `packing.pack` gave, with as many tokens as asked for: more sequences, whose labels are ignored.

    Args:
        longest: tokens that any sequence may have; the row says that its longest one does.
    """
    ends = packed["cu_seq_lens_q"].numpy()
    num_real, num_sequences = int(ends[-1]), len(ends) - 1
    more = num_tokens - num_real
    num_filling = row_sequences(num_sequences, more, longest) - num_sequences
    lengths = np.full(num_filling, more // max(num_filling, 1))
    lengths[: more - int(lengths.sum())] += 1
    begins = np.cumsum(lengths) - lengths
    first = first_position(model)
    places = torch.from_numpy(np.arange(more) - np.repeat(begins, lengths) + first)
    filling: dict[str, Any] = {"labels": IGNORED, "position_ids": places}
    made: dict[str, Any] = {}
    for name, value in packed.items():
        if name == "cu_seq_lens_q":
            made[name] = torch.from_numpy(np.concatenate([ends, num_real + np.cumsum(lengths)]).astype(np.int32))
        elif isinstance(value, torch.Tensor):
            num = num_filling if value.dim() == 1 else more
            end = value.new_empty((*value.shape[:-1], num))
            end[...] = filling.get(name, 0)
            made[name] = torch.cat([value, end], dim=-1)
    return made | {"max_length_q": longest}


WIDTH_STEP = 8
WINDOW_BATCHES = 50
"""Samples are sorted by length inside windows of this many batches: like lengths meet, and a batch is still drawn from
the whole data set."""


def padded_width(length: int, widest: int) -> int:
    """Columns for samples of a length: a multiple of 8, but no more than the widest batch there is.

    cuDNN's attention is prepared anew for every width it has not seen, which takes longer than many steps.

    >>> padded_width(33, 66), padded_width(65, 66)
    (40, 66)
    """
    return min(-(-length // WIDTH_STEP) * WIDTH_STEP, widest)


Batch = dict[str, torch.Tensor]


def apply(model: Any, task: str) -> None:
    """Let a model take packed batches, in place; padded ones go through sdpa as before.

    Raises:
        WorkloadError: a model whose attention is its own code.
    """
    base: Any = backbone(model)
    if getattr(base, "_takes_packed", False):
        _set_attention(model, IMPLEMENTATION)
        return
    if "packed" not in supported_attention(type(base)):
        raise WorkloadError(
            [f"attention packed: {type(base).__name__} computes attention in code of its own, which mixes sequences"],
            hint="take attention sdpa or eager",
        )
    register()
    base._takes_packed = True
    base._attention_before = base.config._attn_implementation
    _set_attention(model, IMPLEMENTATION)
    kind = find_task(task)
    pool = _pool_each if kind.pools_sequences else _pool_each_beside
    hooks: list[Any] = [base.register_forward_pre_hook(_mask_as_needed, with_kwargs=True)]
    if kind.pools_sequences and pools_last_token(type(model)):
        hooks.append(model.register_forward_pre_hook(_give_last_tokens, with_kwargs=True))
        hooks.append(base.register_forward_pre_hook(_give_row, with_kwargs=True))
        pool = _pool_last
    if not kind.pools_itself:
        hooks.append(base.register_forward_hook(pool, with_kwargs=True))
    if kind.packed_output_hook is not None:
        hooks.append(model.register_forward_hook(kind.packed_output_hook, with_kwargs=True))
    base._packing_hooks = tuple(hooks)


def undo(model: Any) -> None:
    """Give back a model as it was before `apply`, which may then be for another task."""
    base: Any = backbone(model)
    if not getattr(base, "_takes_packed", False):
        return
    if base.config._attn_implementation in (IMPLEMENTATION, IN_ROWS):
        set_aside(model)
    for hook in base._packing_hooks:
        hook.remove()
    del base._takes_packed, base._attention_before, base._packing_hooks


def set_aside(model: Any) -> None:
    """Give attention back to what it was before `apply`: the model is as transformers made it, until it is `in_use`."""
    base: Any = backbone(model)
    _set_attention(model, base._attention_before)


@contextmanager
def in_use(model: Any) -> Iterator[None]:
    """Inside, a model that was set aside takes packed batches."""
    base: Any = backbone(model)
    before = base.config._attn_implementation
    _set_attention(model, IMPLEMENTATION)
    try:
        yield
    finally:
        _set_attention(model, before)


def _set_attention(model: Any, implementation: str) -> None:
    base: Any = backbone(model)
    for config in (model.config, base.config):
        config._attn_implementation = implementation


def pack(batch: Batch, model: torch.nn.Module) -> dict[str, Any]:
    """A padded batch as one row of the tokens that are attended to; call the model with it as with any batch.

    Done on the host, so that the device need not be waited for; and by numpy, since torch would wake all its threads
    for so little.
    """
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    kept = np.ones(ids.shape, bool) if mask is None else attended(mask)
    lengths = np.count_nonzero(kept, axis=1)
    if lengths.min() == 0:
        raise WorkloadError(["a sequence of the batch has no token that is attended to: it cannot be packed"])
    odd = [n for n, v in batch.items() if is_per_token(n, v, ids.shape[1]) and len(v) != len(ids)]
    if odd:
        raise WorkloadError([f"{', '.join(odd)}: {len(ids)} sequences have other numbers of rows there"])
    index = torch.from_numpy(np.flatnonzero(kept)).to(ids.device)
    packed: dict[str, Any] = {
        name: value.flatten(0, 1).index_select(0, index)[None] if is_per_token(name, value, ids.shape[1]) else value
        for name, value in batch.items()
        if name != "attention_mask"
    }
    return with_places(packed, lengths, model)


def with_places(packed: dict[str, Any], lengths: Any, model: torch.nn.Module) -> dict[str, Any]:
    """A row of sequences with what says where each is.

    Args:
        packed: the row; positions and the like are put into it.
        lengths: tokens of each sequence, as an array of numpy.
    """
    ends = np.concatenate([[0], np.cumsum(lengths)])
    places = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths) + first_position(model)
    packed["position_ids"] = torch.from_numpy(places)[None]
    if "token_type_ids" not in packed and has_token_types(model):
        packed["token_type_ids"] = torch.zeros_like(packed["input_ids"])
    packed["cu_seq_lens_q"] = torch.from_numpy(ends.astype(np.int32))
    packed["max_length_q"] = int(lengths.max())
    return packed


def is_per_token(name: str, value: torch.Tensor, width: int) -> bool:
    """Whether a tensor of a batch has a column for each of `width` tokens.

    Labels that are fractions are of samples; so are a teacher's answers, unless each token has several numbers.
    """
    has_columns = value.dim() >= PER_TOKEN and value.shape[1] == width
    is_of_sample = name in TARGETS and value.dim() == PER_TOKEN
    return has_columns and not is_of_sample and not (name == "labels" and value.is_floating_point())


def unpack(output: Any, mask: torch.Tensor) -> Any:
    """The output with a row for each sequence again, as long as the padded batch had it, zeros where it was padding.

    Args:
        mask: the attention mask of the padded batch. What has a row for each sequence already stays as it is.
    """
    inside = mask.bool()
    one_row = (1, int(inside.sum()))
    for name, value in output.items():
        if isinstance(value, torch.Tensor) and value.dim() > PER_TOKEN and value.shape[:2] == one_row:
            rows = value.new_zeros(*inside.shape, *value.shape[2:])
            rows[inside] = value[0]
            output[name] = rows
    return output


def has_token_types(model: torch.nn.Module) -> bool:
    """Whether the model adds a vector for the first or second text; its default row is as long as one sequence."""
    return hasattr(embeddings(model), "token_type_embeddings")


def is_applied(model: torch.nn.Module) -> bool:
    """Whether a model takes packed batches now: one that was set aside does not, and would mix their sequences."""
    base: Any = backbone(model)
    names = (IMPLEMENTATION, IN_ROWS)
    return getattr(base, "_takes_packed", False) is True and base.config._attn_implementation in names


def without_padding(batch: Batch) -> Batch:
    """A padded batch without labels that point to padding: tokens that no row will have, places beyond a text's end."""
    mask = batch.get("attention_mask")
    if mask is None:
        return batch
    made, width = dict(batch), mask.shape[1]
    labels = batch.get("labels")
    if labels is not None and is_per_token("labels", labels, width):
        made["labels"] = labels.masked_fill(mask == 0, IGNORED)
    for name in PLACES:
        if name in batch:
            made[name] = batch[name].masked_fill(batch[name] >= mask.sum(1), width)
    return made


def positions_skip(model: torch.nn.Module) -> int | None:
    """The token that positions leave out, whether it is attended to or not: RoBERTa's padding; None for most models."""
    table: Any = embeddings(model)
    return int(table.padding_idx) if hasattr(table, "create_position_ids_from_input_ids") else None


def first_position(model: torch.nn.Module) -> int:
    """Where positions begin: RoBERTa's after its padding."""
    skipped = positions_skip(model)
    return 0 if skipped is None else skipped + 1


def _mask_as_needed(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Have transformers make masks for padded batches alone, while the model takes packed ones."""
    if module.config._attn_implementation in (IMPLEMENTATION, IN_ROWS):
        is_row = kwargs.get("cu_seq_lens_q") is not None
        module.config._attn_implementation = IN_ROWS if is_row else IMPLEMENTATION


def _give_last_tokens(model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """For heads that look for the last token of a row: they are given a row for each sequence, of that token alone."""
    if kwargs.get("cu_seq_lens_q") is None:
        return None
    if model.config.get_text_config().pad_token_id is None:
        raise WorkloadError(
            [f"{type(model).__name__} reads the last token that is not padding, and its config.pad_token_id is None"],
            hint="set model.config.pad_token_id to the tokenizer's pad_token_id, or eos_token_id where it has none",
        )
    row = kwargs["input_ids"]
    last = _last_tokens(row[0], kwargs["cu_seq_lens_q"].long(), padding_id(model.config))
    backbone(model).__dict__["_row"] = (row, last)
    return args, kwargs | {"input_ids": row[0][last][:, None]}


def _last_tokens(row: torch.Tensor, ends: torch.Tensor, padding: int) -> torch.Tensor:
    """The place of each sequence's rightmost token that is not padding, as heads look for it; else of its first."""
    places = torch.arange(len(row), device=row.device)
    counted = torch.where(row != padding, places, -1).float()  # exact up to 16 million tokens
    last = torch.segment_reduce(counted, "max", offsets=ends, axis=0, unsafe=True).long()
    return torch.maximum(last, ends[:-1])


def _give_row(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The backbone has all tokens, whatever its head was given."""
    if kwargs.get("cu_seq_lens_q") is None or "_row" not in module.__dict__:
        return None
    row = module._row[0]
    return ((row, *args[1:]), kwargs) if args else (args, kwargs | {"input_ids": row})


def _pool_last(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """The vectors of the tokens that the head was given."""
    if kwargs.get("cu_seq_lens_q") is None or "_row" not in module.__dict__:
        return output
    _, last = module.__dict__.pop("_row")
    output.last_hidden_state = output.last_hidden_state[0][last][:, None]
    return output


def _pool_each(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """For heads that look at one vector a sequence: its first token's, or the mean of all."""
    if kwargs.get("cu_seq_lens_q") is None:
        return output
    ends = kwargs["cu_seq_lens_q"].long()
    hidden = output.last_hidden_state[0]
    if getattr(module.config, "classifier_pooling", "cls") == "mean":
        each = torch.segment_reduce(hidden.float(), "mean", offsets=ends, axis=0, unsafe=True).to(hidden.dtype)
    else:
        each = hidden[ends[:-1]]
    output.last_hidden_state = each[:, None]
    return _pooled(module, output, each)


def _pool_each_beside(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """The same beside the vectors of all tokens."""
    if kwargs.get("cu_seq_lens_q") is None or getattr(output, "pooler_output", None) is None:
        return output
    return _pooled(module, output, output.last_hidden_state[0][kwargs["cu_seq_lens_q"].long()[:-1]])


def _pooled(module: Any, output: Any, first: torch.Tensor) -> Any:
    if getattr(output, "pooler_output", None) is not None:
        made = module.pooler(first if hasattr(module, "pooler_activation") else first[:, None])
        output.pooler_output = module.pooler_activation(made) if hasattr(module, "pooler_activation") else made
    return output
