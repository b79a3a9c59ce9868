"""`Tracer`: a dispatch mode that sees every operator and follows every storage, and writes what CUDA would ask.

Operators do not run: after the first call of a kind, outputs of the same shape are made directly. What
CUDA does otherwise than meta below autograd is decided here or in a kernel's description.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vramfit.cuda.kernels.elementwise import CHECKS
from vramfit.errors import TraceError
from vramfit.records.stream import Origin, Phase
from vramfit.trace.calls import OWN_RESULTS, Calls, FusedKernel, Output, Remembered, numbers_in, written_by
from vramfit.trace.ledger import Ledger, Places
from vramfit.trace.template import StreamTemplate
from vramfit.trace.unrolling import Unrolling
from vramfit.trace.values import Values, depends_on_values
from vramfit.trace.work import FUSED, WorkTemplate, tensors_in, view_work


@dataclass(frozen=True, slots=True)
class Accumulation:
    """The reference counts that a mode sees when autograd is the only holder."""

    max_tensor_uses: int
    max_storage_uses: int

    @staticmethod
    @cache
    def calibrated() -> "Accumulation":
        """Counts of this torch release, from a sum that a run without a mode does in place."""
        seen: list[tuple[int, int]] = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
                    seen.append(_uses(args[0]))
                return func(*args, **(kwargs or {}))

        with torch.enable_grad():
            x = torch.empty(4, device="meta", requires_grad=True)
            y = x * 1.0
            with Watch():
                # gradients of sin and cos are fresh tensors that nobody else holds
                (torch.sin(y) * torch.cos(y)).sum().backward()
        assert seen, "autograd did not sum gradients"
        return Accumulation(*seen[0])

    def is_in_place(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Whether autograd would write the sum into `left`."""
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        tensor_uses, storage_uses = _uses(left)
        return (
            tensor_uses <= self.max_tensor_uses
            and storage_uses <= self.max_storage_uses
            and left.untyped_storage().nbytes() == left.numel() * left.element_size()
            and torch.ops.aten.is_non_overlapping_and_dense.default(left)
        )


def _uses(tensor: torch.Tensor) -> tuple[int, int]:
    storage_uses = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._use_count(), storage_uses  # type: ignore[attr-defined]


aten = torch.ops.aten

MATMULS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addbmm"})
WITH_BIAS = frozenset({"addmm"})
SCATTERS = frozenset({"scatter_add", "index_put", "index_add", "_unsafe_index_put"})
"""Backwards that write into a tensor of zeros of their own: in place, but for the presence of a mode."""
HOST_OUTPUTS = {"_scaled_dot_product_efficient_attention": (2, 3)}
"""Outputs that a CUDA run keeps on the host although meta shows them on the device: seed and offset."""
TAKES_APART = frozenset({"unbind", "split"})
FACTORIES = frozenset({"arange", "zeros", "ones", "full", "empty", "rand", "randn", "randint", "randperm", "linspace"})
PHASES: dict[str, Phase] = {"backward": "backward", "optimizer": "optimizer"}
ARGUMENT = "argument"
"""A tensor that a compiled kernel, or one of vramfit's own, reads or writes: handing it over is taken to cost the host
as much as a view does, which was not measured by itself."""
MAX_CALLS = 500_000
"""Operators in one trace; BERT-large takes about 20,000."""


class Tracer(TorchDispatchMode):
    """Writes a `StreamTemplate` while a step runs on meta tensors."""

    def __init__(
        self,
        template: StreamTemplate,
        places: Places,
        *,
        shares_calls: bool = False,
        unrolling: Unrolling | None = None,
    ) -> None:
        super().__init__()
        self.template = template
        self.places = places
        self.part = "load"
        self._accumulation = Accumulation.calibrated()
        self._ledger = Ledger(template, unrolling)
        self._calls = Calls(template.probe, shared=shares_calls)
        self.values = Values(template.probe)
        self._workspaces: set[tuple[bool, str]] = set()
        self.workspaces: set[Origin] = set()
        """Where those were asked for that a run keeps."""
        self._is_compiled = False
        self._num_calls = 0
        self._make_origin = cache(Origin)  # most come again, and are found faster than made

    def begin(self, segment: str, part: str) -> None:
        """What follows belongs to this segment of the stream and this part of the run."""
        self._ledger.begin(segment, part)
        self.part = part

    def notice(self, name: str) -> None:
        """The driver is told of a library that is loaded."""
        self._ledger.notice(name)

    def hold(self, tensor: torch.Tensor, operator: str, module: str = "", *, cuda_stream: int = 0) -> None:
        """Follow the storage of a tensor that is there: a parameter, a buffer."""
        if not self._ledger.is_known(tensor):
            size = (tensor.untyped_storage().nbytes(),)
            self._ledger.request(tensor, size, Origin(operator, module, self.part), cuda_stream)

    def let_go(self, tensor: torch.Tensor) -> None:
        """Give back the block of a tensor that goes on without one."""
        self._ledger.let_go(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in a trace: torch's guard against that would cost a tenth of it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # backward runs under the dialect, which would hear every `x.shape`
            return self._dispatch(func, args, kwargs or {})

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator that is handed over without torch's dispatch: no mode may be active, and no gradient needed."""
        return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, writes, asks, check = _described(func)
        if check is not None:
            check(*args)
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return self._answer(args[0])
        self._guard(name, args, kwargs)
        if name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            return self._index_by_truth(func, *args)
        if asks:
            known_result = self.values.made_by(func, args, kwargs)
            if known_result is not None:
                return self._take(func, name, args, kwargs, known_result)
        elif func is aten._to_copy.default and _leaves_device(args[0], kwargs):
            on_host = self.values.on_host(args[0])
            if on_host is not None:
                self._ledger.wait()
                return func(on_host, **kwargs)
        if writes:
            return self._write_in_place(func, args, kwargs)
        if self.part == "backward" and self._reuses_input(name, args):
            result, known = self._call(func, name, args, kwargs)
            self._count(known.work)
            self._ledger.hand_over(args[0], result)
            return result
        result, known = self._call(func, name, args, kwargs)
        self._count(known.work)
        self._follow(name, known, result)
        if name in MATMULS:
            self._take_workspaces(name)
        if self.part != "optimizer":
            self.values.follow(func, name, args, kwargs, result)
            if name == "any" and not result.dim() and self.values.answer(result) is None:
                self.values.give(result, lambda batch: torch.zeros((), dtype=torch.bool))  # is anything wrong: no
        return result

    def _take(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """The result of an operator that looked at values: the host waited for the device to learn the shape."""
        self._ledger.wait()
        made = list(tensors_in(result))
        if made:
            key = (self._calls.key(func, args, kwargs), tuple(tensor.shape for tensor in made))
            known = self._calls.remember(key, name, args, kwargs, result)
            self._count(known.work)
            self._follow(name, known, result)
        return result

    def _call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Remembered]:
        """The result of an operator, from memory where it has been called alike."""
        key = self._calls.key(func, args, kwargs)
        known = self._calls.find(key)
        if known is None:
            result = self._run(func, name, args, kwargs)
            return result, self._calls.remember(key, name, args, kwargs, result)
        return (func(*args, **kwargs) if known.outputs is None else known.make()), known

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """What is called inside was compiled: nothing but the launch is left of it on the host."""
        self._is_compiled = True
        try:
            yield
        finally:
            self._is_compiled = False

    def count_fused(self, kernel: FusedKernel) -> None:
        """Write down what a compiled kernel does, whose operators nobody sees."""
        if self._ledger.counts_work:
            self._count(view_work(ARGUMENT), kernel.num_tensors)
            self._count(self._calls.fused(kernel))

    def _count(self, work: WorkTemplate, num_calls: int = 1) -> None:
        """Write down what an operator does."""
        if not self._ledger.counts_work:
            return
        recomputes = self.part == "backward" and self.places.in_module
        phase = "recompute" if recomputes else PHASES.get(self.part, "forward")
        self._ledger.work(work, "compiled" if self._is_compiled else phase, num_calls)

    def _write_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Nothing is allocated and nothing changes shape: what is written to is the result."""
        written = written_by(func, args, kwargs)
        if self.part != "optimizer":
            self.values.write(func, args, kwargs, written)
        if self._ledger.counts_work:
            self._count(self._calls.in_place(func, args, kwargs, written))
            if _described(func)[0].startswith(FUSED):
                self._count(view_work(ARGUMENT), sum(isinstance(a, torch.Tensor) for a in args))
        if not any(t.is_meta for t in tensors_in((args, tuple(kwargs.values())))):
            return func(*args, **kwargs)
        if not func._schema.returns:
            return None
        return written[0] if len(func._schema.returns) == 1 else tuple(written)

    def _run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return OWN_RESULTS[name](*args, **kwargs) if name in OWN_RESULTS else func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            where = self._module() or "the model"
            said = f"{name} in {where} cannot be followed without data: {str(error).splitlines()[0]}"
            if name == "_to_copy" and _leaves_device(args[0], kwargs):
                said = f"{where} reads the values of a tensor on the host, which a prediction does not have"
            raise TraceError(
                said,
                operator=name,
                module_path=self._module(),
                hint="its shapes depend on values; describe the workload with a model that does not branch on data",
            ) from error

    def _index_by_truth(self, func: Any, x: torch.Tensor, indices: list[torch.Tensor | None]) -> Any:
        """CUDA turns a mask into positions first (TensorAdvancedIndexing.cpp, expandTensors)."""
        positions: list[torch.Tensor | None] = []
        with self:
            for index in indices:
                if index is not None and index.dtype == torch.bool:
                    positions.extend(aten.nonzero.default(index).unbind(1))
                else:
                    positions.append(index)
            return func(x, positions)

    def _guard(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model that goes through its samples one by one would not end at the probe batch."""
        self._num_calls += 1
        if self.template.probe is None:
            return
        takes_apart = name in TAKES_APART and _num_pieces(name, *args) >= self.template.probe
        on_host = name in FACTORIES and str(kwargs.get("device", "cpu")).startswith(("cpu", "None"))
        makes_much = on_host and any(n >= self.template.probe for n in numbers_in(args))
        if takes_apart or makes_much or self._num_calls > MAX_CALLS:
            where = self._module()
            raise TraceError(
                f"{where or 'the model'} goes through its batch sample by sample ({name})",
                operator=name,
                module_path=where,
            )

    def _reuses_input(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether autograd, without a mode watching, would write into the first argument."""
        if torch.is_grad_enabled() or not args or not isinstance(args[0], torch.Tensor):
            return False
        if not self._ledger.lives(args[0]):
            return False
        if name in SCATTERS:
            return "index_put" not in name or args[3:] == (True,)  # what was written over had no gradient: a copy
        return name == "add" and isinstance(args[1], torch.Tensor) and self._accumulation.is_in_place(args[0], args[1])

    def _follow(self, name: str, known: Remembered, result: Any) -> None:
        """Write down what the result asks of memory; views are known, host tensors are not followed."""
        if known.outputs is None:
            for tensor in (result,) if known.single else tensors_in(result):
                if tensor.is_meta and not self._ledger.is_known(tensor):
                    self._ledger.request(tensor, self._calls.size(tensor), self._origin(name))
            return
        made = [result] if known.single else result
        if known.call is not None:
            ids = tuple(self._id(name, i, o, t) for i, (o, t) in enumerate(zip(known.outputs, made, strict=True)))
            self._ledger.launch(known.call, ids, self._origin(name))
            return
        for output, tensor in zip(known.outputs, made, strict=True):
            if isinstance(output, Output) and any(output.size):
                self._ledger.request(tensor, output.size, self._origin(name))

    def _id(self, name: str, index: int, output: Any, tensor: Any) -> int:
        """The number of a kernel's output; 0 for what takes no block on the device."""
        if not isinstance(output, Output) or not any(output.size):
            return 0
        if index in HOST_OUTPUTS.get(name, ()):
            self._ledger.keep_on_host(tensor)
            return 0
        return self._ledger.follow(tensor)

    def workspaces_are_there(self) -> None:
        """Forward passes went before: their thread has its workspaces."""
        self._workspaces |= {(False, "cublas_workspace"), (False, "cublaslt_workspace")}

    def _take_workspaces(self, name: str) -> None:
        """cuBLAS keeps a workspace for each thread, from its first product on; backward has its own thread."""
        profile = self.template.profile
        kinds = [("cublas_workspace", profile.cublas_workspace_bytes)]
        if name in WITH_BIAS:
            kinds.append(("cublaslt_workspace", profile.cublaslt_workspace_bytes))
        for kind, size in kinds:
            workspace = (self.part == "backward", kind)
            if workspace in self._workspaces:
                continue
            if kind == "cublas_workspace":
                self.notice("cublas_loaded")
            self._workspaces.add(workspace)
            origin = Origin(kind, "", self.part)
            self.workspaces.add(origin)
            self._ledger.request_for_good(size, origin)

    def _answer(self, tensor: torch.Tensor) -> Any:
        """A program asks for a value: one that the inputs decide, or an optimizer's, which changes no allocation."""
        self._ledger.wait()
        known = self.values.answer(tensor)
        if known is not None:
            return known
        if self.part == "optimizer":
            return 0.0 if tensor.dtype.is_floating_point else 0
        where = self._module()
        raise TraceError(
            f"{where or 'the model'} branches on the value of a tensor, which a prediction does not have",
            operator="_local_scalar_dense",
            module_path=where,
            hint="describe the workload with a model whose forward does not depend on data",
        )

    def _module(self) -> str:
        if self.part == "forward":
            return self.places.forward()
        return self.places.backward() if self.part == "backward" else ""

    def _origin(self, operator: str) -> Origin:
        recomputes = self.part == "backward" and self.places.in_module
        return self._make_origin(operator, self._module(), "recompute" if recomputes else self.part)


@cache
def _described(func: Any) -> tuple[str, bool, bool, Callable[..., None] | None]:
    """An operator's name without namespace, whether it writes into arguments, or looks at values; what CUDA checks."""
    name = func._schema.name.partition("::")[2]
    writes = func._schema.is_mutable and not name.startswith(("set_", "resize_"))
    return name, writes, depends_on_values(func), CHECKS.get(name)


def _leaves_device(tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether a copy of a tensor of the device is made on the host."""
    return tensor.is_meta and str(kwargs.get("device")) == "cpu"


def _num_pieces(name: str, x: torch.Tensor, *arguments: Any) -> int:
    """How many tensors `unbind(x, dim)` or `split(x, size, dim)` gives."""
    size, dim = (1, *arguments, 0)[:2] if name == "unbind" else (*arguments, 0)[:2]
    return int(x.shape[dim]) // max(int(size), 1) if isinstance(size, int) else 0
