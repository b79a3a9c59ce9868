"""`EmulatedGPU`: inside it, every tensor's storage takes memory of a simulated GPU, which can run out.

Two things CUDA does otherwise than a CPU, as far as memory shows it: on a CPU, attention with dropout writes its scores
out, and dropout keeps its mask in full precision. Here both keep what a GPU's kernels keep; values are computed by the
CPU's own kernels, out of sight.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass_type

from vramfit.allocator.caching import CachingAllocator, SimulatedOutOfMemory
from vramfit.allocator.options import AllocatorOptions
from vramfit.errors import WorkloadError
from vramfit.units import format_bytes, parse_bytes

Meet = Callable[[torch.Tensor], None]
"""Gives a tensor its block in the emulated memory."""
ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Positional arguments of `scaled_dot_product_attention`."""


class EmulatedGPU:
    """A GPU of any size, rehearsed on the CPU.

    Arithmetic and autograd are real; attention and dropout keep what CUDA's kernels keep. Every storage that operators
    make or meet goes through a simulation of PyTorch's caching allocator; beyond its capacity a real
    `torch.OutOfMemoryError` is raised, worded as CUDA words it. Tensors made before it was entered count from the first
    operator that meets them.

    Args:
        memory: capacity, such as "2GiB".
        fail_at: numbers of allocations that fail although there is room; the first is 1.
        allocator: `default` or `expandable`.

    >>> with EmulatedGPU(memory="64MiB") as gpu:
    ...     x = torch.zeros(1024, 1024)
    >>> gpu.allocated_bytes, gpu.num_allocations
    (4194304, 1)
    """

    def __init__(self, memory: str | int, *, fail_at: Iterable[int] = (), allocator: str = "default") -> None:
        self.memory_bytes = parse_bytes(memory, name="memory")
        self.fail_at = set(fail_at)
        if allocator not in ("default", "expandable"):
            raise WorkloadError([f"allocator {allocator!r} is not default or expandable"])
        options = AllocatorOptions(expandable_segments=allocator == "expandable")
        self._allocator = CachingAllocator(self.memory_bytes, options, capacity_kind="physical")
        self._held: dict[int, tuple[Any, Any]] = {}
        self._taken_bytes = 0
        self._course: list[int] | None = None
        self._mode = _Mode(self)
        self._kernels = Kernels(self._meet)
        self.num_allocations = 0
        """Allocations asked for so far, failed ones included."""
        self.num_failures = 0
        """Allocations that failed."""

    def __enter__(self) -> "EmulatedGPU":
        self._mode.__enter__()
        self._kernels.__enter__()
        _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.remove(self)
        self._kernels.__exit__(kind, value, trace)
        self._mode.__exit__(kind, value, trace)

    @property
    def capacity_bytes(self) -> int:
        """What is there for this process: all of it, without what another one took."""
        return max(self.memory_bytes - self._taken_bytes, 0)

    @property
    def requested_bytes(self) -> int:
        """As `requested_bytes.all.current` of `torch.cuda.memory_stats`."""
        return self._allocator.requested_bytes

    @property
    def max_requested_bytes(self) -> int:
        """Its peak."""
        return self._allocator.peak_requested_bytes

    @property
    def reserved_bytes(self) -> int:
        """As `torch.cuda.memory_reserved`."""
        return self._allocator.reserved_bytes

    @property
    def allocated_bytes(self) -> int:
        """As `torch.cuda.memory_allocated`."""
        return self._allocator.allocated_bytes

    @property
    def max_allocated_bytes(self) -> int:
        """As `torch.cuda.max_memory_allocated`."""
        return self._allocator.peak_allocated_bytes

    @property
    def max_reserved_bytes(self) -> int:
        """As `torch.cuda.max_memory_reserved`."""
        return self._allocator.peak_reserved_bytes

    @property
    def num_retries(self) -> int:
        """How often the allocator freed its cache to make room."""
        return self._allocator.num_retries

    def reset_peaks(self) -> None:
        """As `torch.cuda.reset_peak_memory_stats`."""
        self._allocator.reset_peaks()

    def empty_cache(self) -> None:
        """As `torch.cuda.empty_cache`."""
        self._allocator.empty_cache()

    @contextmanager
    def recorded(self, course: list[int]) -> Iterator[None]:
        """Inside, `course` gets what is requested after every allocation and free."""
        before, self._course = self._course, course
        try:
            yield
        finally:
            self._course = before

    def take(self, memory: str | int) -> None:
        """Another process takes this much; what is in use already stays."""
        self._taken_bytes += parse_bytes(memory, name="memory")
        self._limit()

    def release(self) -> None:
        """The other process gives back all that it took."""
        self._taken_bytes = 0
        self._limit()

    def _limit(self) -> None:
        self._allocator.set_capacity(self.capacity_bytes)

    def _meet(self, tensor: torch.Tensor) -> None:
        """Give a storage its block, if it has none yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held or storage.nbytes() == 0 or tensor.device.type != "cpu":
            return
        self.num_allocations += 1
        num_bytes = storage.nbytes()
        block = self._malloc(num_bytes)
        self._held[key] = (block, weakref.ref(storage, lambda _: self._free(key, block)))
        self._note()

    def _malloc(self, num_bytes: int) -> Any:
        if self.num_allocations in self.fail_at:
            raise self._out_of_memory(num_bytes)
        try:
            return self._allocator.malloc(num_bytes)
        except SimulatedOutOfMemory:
            failure = self._out_of_memory(num_bytes)
        raise failure

    def _free(self, key: int, block: Any) -> None:
        held = self._held.get(key)
        if held is not None and held[0] is block:
            del self._held[key]
            self._allocator.free(block)
            self._note()

    def _note(self) -> None:
        if self._course is not None:
            self._course.append(self.requested_bytes)

    def _out_of_memory(self, num_bytes: int) -> torch.OutOfMemoryError:
        """CUDACachingAllocator.cpp (2.11) words it so."""
        self.num_failures += 1
        free = max(self.capacity_bytes - self._allocator.reserved_bytes, 0)
        cached = self._allocator.reserved_bytes - self._allocator.allocated_bytes
        return torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {format_bytes(num_bytes)}. GPU 0 has a total capacity of "
            f"{format_bytes(self.memory_bytes)} of which {format_bytes(free)} is free. Of the allocated memory "
            f"{format_bytes(self._allocator.allocated_bytes)} is allocated by PyTorch, and {format_bytes(cached)} "
            "is reserved by PyTorch but unallocated."
        )


_active: list[EmulatedGPU] = []


def active_gpu() -> EmulatedGPU | None:
    """The emulated GPU that was entered last and is not left yet."""
    return _active[-1] if _active else None


class _Mode(TorchDispatchMode):
    """Tells the GPU of every tensor that goes into or comes out of an operator."""

    def __init__(self, gpu: EmulatedGPU) -> None:
        super().__init__()
        self._gpu = gpu

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: that would import `torch._dynamo`, and ask it at every operator."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a quantized tensor goes first; its plain parts come here
        for tensor in _tensors((*args, *kwargs.values())):
            self._gpu._meet(tensor)
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            self._gpu._meet(tensor)
        return result


_GROUPS = (list, tuple)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Every tensor among these, those of lists and tuples included: asked for twice at each operator."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, _GROUPS):
            found += _tensors(value)
    return found


class Kernels(TorchFunctionMode):
    """Takes the place of some functions while it is active.

    Args:
        meet: called with every tensor that a kernel would request.
    """

    def __init__(self, meet: Meet) -> None:
        super().__init__()
        self._meet = meet

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not _learns_mask(*args, **kwargs):
            return self._attention(*args, **kwargs)
        if func is F.dropout and not kwargs.get("inplace"):
            return _dropout(*args, **kwargs)
        if func is torch.Tensor.backward:
            return self._backward(*args, **kwargs)
        return func(*args, **kwargs)

    def _backward(
        self,
        loss: torch.Tensor,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = (),
    ) -> None:
        """Layers that are computed again in backward need the mode too: torch has taken it off here."""
        if gradient is None and loss.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        chosen = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs or ())
        with self:
            gradient = torch.ones_like(loss) if gradient is None else gradient
            keep = create_graph if retain_graph is None else retain_graph
            _engine_run_backward(
                (loss,), (gradient,), keep, create_graph, chosen, allow_unreachable=True, accumulate_grad=True
            )

    def _attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        settings: dict[str, Any] = {"attn_mask": None} | dict(zip(ATTENTION, args, strict=False)) | kwargs
        query, key, value, attn_mask = (settings.pop(name) for name in ATTENTION[:4])
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            attn_mask = attn_mask.to(dtype) if attn_mask is not None and attn_mask.dtype != torch.bool else attn_mask
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, torch.full((), float("-inf"), dtype=query.dtype))
        made: torch.Tensor = _Fused.apply(query, key, value, attn_mask, settings, self._meet)
        return made


def _learns_mask(*args: Any, attn_mask: Any = None, **kwargs: Any) -> bool:
    """Whether what is added to the scores learns: then torch's own code is left alone."""
    mask = args[3] if len(args) > 3 else attn_mask
    return mask is not None and bool(mask.requires_grad)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


class _Fused(torch.autograd.Function):
    """Attention that keeps its inputs, its output and a number a row; backward makes the scores anew."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        query, key, value, mask, settings, meet = given
        for tensor in (query, key, value) if mask is None else (query, key, value, mask):
            meet(tensor)
        with _disable_current_modes():
            ctx.generator = torch.get_rng_state() if settings.get("dropout_p") else None
            out = F.scaled_dot_product_attention(query, key, value, mask, **settings)
            rows = torch.empty(query.shape[:-1], dtype=torch.float32)
        meet(out)
        meet(rows)
        ctx.save_for_backward(query, key, value, mask, out, rows)
        ctx.settings, ctx.meet = settings, meet
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        query, key, value, mask, _, _ = ctx.saved_tensors
        with (
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
        ):
            if ctx.generator is not None:
                torch.set_rng_state(ctx.generator)
            query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
            out = F.scaled_dot_product_attention(query, key, value, mask, **ctx.settings)
            gradients = torch.autograd.grad(out, (query, key, value), grad)
        for gradient in gradients:
            ctx.meet(gradient)
        return (*gradients, None, None, None)
