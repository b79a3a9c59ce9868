"""What an operator does on the device: arithmetic, bytes, launches, as functions of the batch.

Every dimension of every tensor in a step is `k · batch + c`. A trace runs at a batch that is a large prime, so that k
and c can be read from the number itself: nothing else in a model is a multiple of that prime.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from vramfit.records.stream import Kind, Phase, Stretch, WorkItem

SEQUENCES = (list, tuple)
PROBE_BATCH = 2**31 - 1
"""A Mersenne prime: far above any other dimension, and small enough that byte counts stay below 2**63."""

Affine = tuple[int, int]
"""(k, c): k · batch + c."""

Polynomial = tuple[int, ...]
"""Coefficients of 1, batch, batch², …"""


def split(n: int, probe: int | None) -> Affine:
    """k and c of a number seen in a trace at batch `probe`; a trace at a real batch has only constants.

    >>> split(3 * PROBE_BATCH + 1, PROBE_BATCH), split(768, PROBE_BATCH), split(96, None)
    ((3, 1), (0, 768), (0, 96))
    """
    if probe is None:
        return 0, n
    k, c = divmod(n, probe)
    return (k + 1, c - probe) if c > probe // 2 else (k, c)


def at(size: Affine, batch: int) -> int:
    """The number at a real batch."""
    return size[0] * batch + size[1]


def product(sizes: tuple[Affine, ...], factor: int = 1) -> Polynomial:
    """The polynomial of a product of dimensions, times a constant."""
    result = [factor]
    for k, c in sizes:
        if k == 0:
            result = [x * c for x in result]
        else:
            longer = [0] * (len(result) + 1)
            for i, x in enumerate(result):
                longer[i] += x * c
                longer[i + 1] += x * k
            result = longer
    return tuple(result)


def evaluate(polynomial: Polynomial, batch: int) -> int:
    """Its value at a real batch."""
    result = 0
    for coefficient in reversed(polynomial):
        result = result * batch + coefficient
    return result


PRODUCTS = {
    "mm": 0,
    "bmm": 0,
    "addmm": 1,
    "baddbmm": 1,
    "_int_mm": 0,
    "_weight_int8pack_mm": 0,
    "_weight_int4pack_mm": 0,
}
"""Matrix products, and where the left operand stands among their arguments."""
REDUCTIONS = frozenset(
    [
        *("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm"),
        *("native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "native_group_norm"),
        *("sum", "mean", "var_mean", "linalg_vector_norm", "cumsum", "all", "any", "max", "amax", "argmax"),
        *("nll_loss_forward", "nll_loss_backward"),
    ]
)
EMBEDDINGS = frozenset(
    [
        *("embedding", "embedding_dense_backward", "index", "index_select", "gather", "scatter_add"),
        *("index_put", "_unsafe_index_put", "index_add", "nonzero"),
    ]
)
TAKES_ROWS = frozenset(["embedding", "index", "index_select", "gather"])
"""They read what they give, not all of their first argument."""
COPIES = frozenset(["_to_copy", "clone", "copy_", "cat", "stack", "contiguous"])
MAKES_NOTHING = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"])
LAUNCHES = {"native_layer_norm_backward": 2, "embedding_dense_backward": 10}
"""Kernels of operators that take several; torch 2.11's sources, the embedding's sort counted roughly."""
ATTENTION_PREFIX = "_scaled_dot_product_"
ATTENTION_BACKWARD_LAUNCHES = 3
PACKED_ATTENTION = {"_flash_attention_forward": 6, "_flash_attention_backward": 9}
"""Attention over sequences that lie end to end, and where the longest one's length stands among the arguments."""
FUSED = "fused_"
"""Operators of fused layers, which read or write every tensor once."""
LISTS = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach_")
LIST_COPY = "_foreach_copy_"
FOREACH_TENSORS = (110, 64, 48, 36, 30)
FOREACH_ELEMENTS = 65536 * 320
"""Most tensors and elements a launch, by number of lists: MultiTensorApply.cuh (2.11)."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkTemplate:
    """The work of a call before the batch is known; compared by identity, since equal calls share one."""

    operator: str
    kind: Kind
    num_launches: int
    num_bytes: Polynomial = ()
    flops: Polynomial = ()
    dtype: str = ""
    product: tuple[Affine, ...] | None = None
    num_tensors: int = 1

    @property
    def figures(self) -> tuple[Any, ...]:
        """Equal for calls that do the same."""
        return tuple(getattr(self, name) for name in WorkTemplate.__slots__)


@lru_cache(maxsize=2**15)  # passes of a step, and its steps, are made of the same few
def _item(work: WorkTemplate, batch: int, phase: Phase, num_calls: int) -> WorkItem:
    """So many of these calls at a real batch."""
    count, m, n, k = (at(d, batch) for d in work.product) if work.product else (0, 0, 0, 0)
    return WorkItem(
        operator=work.operator,
        kind=work.kind,
        phase=phase,
        num_calls=num_calls,
        num_launches=work.num_launches,
        num_bytes=evaluate(work.num_bytes, batch),
        flops=2 * count * m * n * k if work.product else evaluate(work.flops, batch),
        dtype=work.dtype,
        product=(count, m, n, k) if work.product else None,
        num_tensors=work.num_tensors,
    )


class StretchTemplate:
    """How often each call came in a stretch of a step; see `records.work.Stretch`."""

    __slots__ = ("_latest", "calls", "waits")

    def __init__(self) -> None:
        self.calls: dict[tuple[WorkTemplate, Phase], int] = {}
        self.waits = False
        self._latest: tuple[tuple[int, int, bool], Stretch] | None = None

    def count(self, work: WorkTemplate, phase: Phase, num_calls: int = 1) -> None:
        self.calls[work, phase] = self.calls.get((work, phase), 0) + num_calls

    def at(self, batch: int) -> Stretch:
        """The stretch at a real batch; a step of another number of passes asks for the same again."""
        asked = (batch, sum(self.calls.values()), self.waits)
        if self._latest is None or self._latest[0] != asked:
            items = tuple(_item(work, batch, phase, num_calls) for (work, phase), num_calls in self.calls.items())
            self._latest = asked, Stretch(items=items, waits=self.waits)
        return self._latest[1]


def work_of(name: str, args: tuple[Any, ...], results: Iterable[Any], probe: int | None) -> WorkTemplate:
    """The work of an operator that gives new tensors.

    Args:
        name: the operator, without its namespace.
        args: its arguments, keywords included.
        results: what it gave.
        probe: the batch of the trace, where sizes are functions of it.
    """
    made = [t for t in results if isinstance(t, torch.Tensor)]
    if name.startswith(LISTS):
        return list_work(name, args, made)
    if name in MAKES_NOTHING or not any(t.device.type == "meta" for t in made):
        return WorkTemplate(name, "none", 0)
    taken = list(tensors_in(args))
    if name in TAKES_ROWS:
        taken = [*made, *taken[1:]]
    elif name == "embedding_dense_backward":  # rows are read, added and written; the rest is only cleared
        taken = [taken[0], *taken]
    num_bytes = _sum(_bytes(t, probe) for t in (*taken, *made))
    dtype = _dtype(taken or made)
    if name in PRODUCTS:
        dims = _dims(args[PRODUCTS[name]], made[0], probe)
        return WorkTemplate(name, "gemm", 1, num_bytes, dtype=dtype, product=dims)
    if name.startswith(ATTENTION_PREFIX):
        return _attention(name, taken, num_bytes, probe)
    if name in PACKED_ATTENTION:
        return _attention(name, taken, num_bytes, probe, longest=args[PACKED_ATTENTION[name]])
    if any(t.device.type == "cpu" and t.dim() for t in taken):
        return WorkTemplate(name, "transfer", 1, _sum(_bytes(t, probe) for t in made))
    return WorkTemplate(name, _kind(name), LAUNCHES.get(name, 1), num_bytes, dtype=dtype)


def work_in_place(name: str, args: tuple[Any, ...], written: list[Any], probe: int | None) -> WorkTemplate:
    """The work of an operator that writes into its arguments; of lists, each tensor counts."""
    taken = list(tensors_in(args))
    if not any(t.device.type == "meta" for t in taken):
        return WorkTemplate(name, "none", 0, num_tensors=len(taken))
    if not name.startswith(LISTS):
        num_bytes = _sum(_bytes(t, probe) for t in tensors_in(written))
        if any(t.device.type == "cpu" and t.dim() for t in taken):
            return WorkTemplate(name, "transfer", 1, num_bytes)
        num_bytes = _sum([() if name.startswith(FUSED) else num_bytes, *(_bytes(t, probe) for t in taken)])
        if name.removesuffix("_") in PRODUCTS:
            dims = _dims(args[PRODUCTS[name.removesuffix("_")]], written[0], probe)
            return WorkTemplate(name, "gemm", 1, num_bytes, dtype=_dtype(taken), product=dims)
        return WorkTemplate(name, _kind(name), 1, num_bytes, dtype=_dtype(taken))
    return list_work(name, args, written)


def list_work(name: str, args: tuple[Any, ...], written: Iterable[Any]) -> WorkTemplate:
    """The work of an operator over lists of tensors; their sizes do not depend on the batch."""
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], torch.Tensor)]
    num_tensors = len(lists[0]) if lists else 1
    num_elements = sum(t.numel() for t in lists[0]) if lists else 0
    num_bytes = sum(t.nbytes for t in tensors_in(args))
    if name != LIST_COPY:  # which does not read what it writes
        num_bytes += sum(t.nbytes for t in tensors_in(tuple(written)))
    most = FOREACH_TENSORS[min(len(lists), len(FOREACH_TENSORS)) - 1]
    num_launches = max(-(-num_tensors // most), -(-num_elements // FOREACH_ELEMENTS))
    kind: Kind = "copy" if name == LIST_COPY else "optimizer"
    return WorkTemplate(name, kind, num_launches, (num_bytes,), num_tensors=num_tensors)


@cache
def view_work(name: str) -> WorkTemplate:
    """An operator that runs nothing on the device."""
    return WorkTemplate(name, "none", 0)


def _kind(name: str) -> Kind:
    if name in REDUCTIONS:
        return "reduction"
    if name in EMBEDDINGS:
        return "embedding"
    return "copy" if name in COPIES else "elementwise"


def _attention(
    name: str, taken: list[torch.Tensor], num_bytes: Polynomial, probe: int | None, longest: int | None = None
) -> WorkTemplate:
    """Scores and weighted values: two products forward; five backward, which makes the scores anew."""
    backward = name.endswith("_backward")
    query, key = taken[1:3] if backward else taken[:2]
    dims = [*query.shape, key.shape[-2] if longest is None else longest]
    flops = product(tuple(split(n, probe) for n in dims), 10 if backward else 4)
    launches = ATTENTION_BACKWARD_LAUNCHES if backward else 1
    return WorkTemplate(name, "attention", launches, num_bytes, flops, _dtype([query]))


def _dims(left: torch.Tensor, out: torch.Tensor, probe: int | None) -> tuple[Affine, ...]:
    count = left.shape[0] if left.dim() == 3 else 1
    return tuple(split(n, probe) for n in (count, out.shape[-2], out.shape[-1], left.shape[-1]))


def _dtype(tensors: list[torch.Tensor]) -> str:
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""


def _bytes(tensor: torch.Tensor, probe: int | None) -> Polynomial:
    """What is touched of a tensor: repeated dimensions once."""
    dims = tuple(split(n, probe) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return product(dims, tensor.element_size())


def _sum(polynomials: Iterable[Polynomial]) -> Polynomial:
    total: list[int] = []
    for polynomial in polynomials:
        total += [0] * (len(polynomial) - len(total))
        for i, coefficient in enumerate(polynomial):
            total[i] += coefficient
    return tuple(total)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, SEQUENCES):
        for item in value:
            yield from tensors_in(item)
