"""Attention over sequences that lie end to end in one row, as transformers' attention interface calls it."""

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from vramfit.errors import WorkloadError
from vramfit.quiet import import_modelling
from vramfit.workload import Workload

IMPLEMENTATION, IN_ROWS = "vramfit_packed", "vramfit_packed_rows"
"""Names in transformers' attention interface: for batches that may be padded, and for calls with packed rows, for which
transformers then makes no masks: it would look at the positions of a row on the device, and wait for the answer."""
NOT_HERE = {
    "softcap": "caps attention scores (softcap)",
    "s_aux": "adds sinks to attention scores (s_aux)",
    "position_bias": "adds a bias for positions to attention scores",
}
"""Arguments that some families give their attention, and that the kernel does not have."""
FLASH_TYPES = (torch.float16, torch.bfloat16)
FLASH_CAPABILITY = (8, 0)
HEAD_MULTIPLE, MAX_HEAD = 8, 256
"""Sizes of heads that the flash kernel takes (flash_attn/flash_api.cpp, 2.11)."""
PACKED_PRECISIONS = ("amp-bf16", "amp-fp16", "bf16", "fp16")
"""In which products, and so attention's inputs, are of these types."""


def register() -> None:
    """Make the kernel known to transformers."""
    import_modelling()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionInterface.register(IN_ROWS, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


def _mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """None without padding: a packed row has none, and a window is the kernel's business."""
    if attention_mask is None:
        return None
    from transformers.masking_utils import sdpa_mask

    made: torch.Tensor | None = sdpa_mask(*args, attention_mask=attention_mask, **kwargs)
    return made


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each sequence of a packed row; `sdpa` where the batch is padded.

    Keys and values may have fewer heads than queries (grouped-query attention), and values a size of their own.

    Raises:
        WorkloadError: the family adds to attention scores what the kernel does not.
    """
    _check(module, kwargs)
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    window = -1 if sliding_window is None else sliding_window - 1
    if cu_seq_lens_q is None or max_length_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attention_mask = _visible(query, window, causal) if attention_mask is None else attention_mask
        made: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=causal
        )
        return made
    if value.dtype in FLASH_TYPES:  # rotary positions may leave the others in fp32
        query, key = query.to(value.dtype), key.to(value.dtype)
    if has_flash(query):
        size = value.shape[-1]
        if size < query.shape[-1]:  # the kernel has one size for all three
            value = F.pad(value, (0, query.shape[-1] - size))
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # of `x[0]`, backward would be a copy
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, dropout, causal, False,
            scale=scaling, window_size_left=window, window_size_right=0 if causal else window,
        )[0]  # fmt: skip
        return out[None, ..., :size], None
    row = PackedHeads(cu_seq_lens_q, dropout, scaling, window, causal)
    return attend_one_by_one(query, key, value, row), None


def _check(module: torch.nn.Module, given: dict[str, Any]) -> None:
    found = [what for name, what in NOT_HERE.items() if given.get(name) is not None]
    if found:
        raise WorkloadError(
            [f"attention packed: {type(module).__name__} {found[0]}, which the packed kernel does not"],
            hint="take attention sdpa or eager",
        )


def has_flash(query: torch.Tensor) -> bool:
    """Whether torch's flash kernel takes such tensors; a prediction is for a GPU that has it."""
    if query.dtype not in FLASH_TYPES or query.device.type == "cpu" or not _takes(query.shape[-1]):
        return False
    return query.device.type == "meta" or _is_new_enough(query.device.index)


def takes_heads(config: Any) -> bool:
    """Whether the flash kernel takes the heads of a configuration."""
    size = getattr(config, "head_dim", None)
    if size is None:
        width, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
        size = width // heads if width and heads else HEAD_MULTIPLE
    return _takes(size)


def _takes(head_size: int) -> bool:
    return head_size % HEAD_MULTIPLE == 0 and head_size <= MAX_HEAD


def has_packed_kernel(device: torch.device, asked: Workload | str) -> bool:
    """Whether a device has the kernel for the precision of a workload: 16 bits, on a GPU that is new enough."""
    precision = asked if isinstance(asked, str) else asked.precision
    if device.type != "cuda" or precision not in PACKED_PRECISIONS:
        return False
    return is_new_enough(device)


def is_new_enough(device: torch.device) -> bool:
    """Whether a GPU has the flash kernel."""
    return bool(_is_new_enough(device.index))


def _is_new_enough(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= FLASH_CAPABILITY


class PackedHeads(NamedTuple):
    """How the sequences of a row are attended to."""

    ends: torch.Tensor
    dropout: float
    scaling: float | None
    window: int
    causal: bool


def attend_one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedHeads) -> torch.Tensor:
    """Where there is no such kernel: right, and slow; compiled, it would be so anew for each number of sequences."""
    lengths = row.ends.diff().tolist()
    parts = zip(*(torch.split(x, lengths, dim=2) for x in (query, key, value)), strict=True)
    groups = query.shape[1] != key.shape[1]
    made = []
    for q, k, v in parts:
        mask = _visible(q, row.window, row.causal)
        causal = row.causal and mask is None
        made.append(
            F.scaled_dot_product_attention(
                q, k, v, mask, dropout_p=row.dropout, scale=row.scaling, is_causal=causal, enable_gqa=groups
            )
        )
    return torch.cat(made, dim=2).transpose(1, 2).contiguous()  # as sdpa gives it


@cache
def tell_compiler() -> None:
    """Have `torch.compile` take the answer about the GPU as it is, and leave the loop over sequences alone.

    Before anything is compiled, and not when this module is imported: it imports the compiler.
    """
    global _is_new_enough, attend_one_by_one
    _is_new_enough = torch.compiler.assume_constant_result(_is_new_enough)  # type: ignore[no-untyped-call]
    attend_one_by_one = torch.compiler.disable(attend_one_by_one)  # type: ignore[no-untyped-call]


def _visible(query: torch.Tensor, window: int, causal: bool) -> torch.Tensor | None:
    """Which tokens of its sequence a token sees, where there is a window; None for all, or for all before it."""
    length = query.shape[2]
    if window < 0 or length <= window + 1:
        return None
    places = torch.arange(length, device=query.device)
    before = places[:, None] - places
    return (before >= 0) & (before <= window) if causal else before.abs() <= window
