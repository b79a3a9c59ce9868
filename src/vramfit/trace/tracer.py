"""`Tracer`: a dispatch mode that sees every operator and follows every storage, and writes what CUDA would ask.

Operators do not run: after the first call of a kind, outputs of the same shape are made directly. What
CUDA does otherwise than meta below autograd is decided here or in a kernel's description.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vramfit.cuda.kernels.registry import KERNELS
from vramfit.cuda.profile import CudaProfile
from vramfit.errors import TraceError
from vramfit.records.stream import Origin
from vramfit.trace.accumulation import Accumulation
from vramfit.trace.affine import Polynomial, product, split
from vramfit.trace.places import Places
from vramfit.trace.template import (
    CallTemplate,
    Entry,
    Launch,
    Notice,
    Part,
    Release,
    Request,
    SpecTemplate,
    StreamTemplate,
)

aten = torch.ops.aten

MATMULS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addbmm"})
WITH_BIAS = frozenset({"addmm"})
SCATTERS = frozenset({"scatter_add", "index_put", "index_add", "_unsafe_index_put"})
"""Backwards that write into a tensor of zeros of their own: in place, but for the presence of a mode."""
HOST_OUTPUTS = {
    "_scaled_dot_product_efficient_attention": (2, 3),
    "_scaled_dot_product_flash_attention": (),
}
"""Outputs that a CUDA run keeps on the host although meta shows them on the device."""


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor an operator gave."""

    layout: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
    """Shape, stride, type."""


@dataclass(frozen=True, slots=True)
class _Remembered:
    """What an operator gave for one kind of arguments."""

    specs: tuple[Any, ...] | None
    """An `_Output` for each tensor, other values as they were; None: it must really run (views, host tensors)."""
    single: bool
    sizes: tuple[Polynomial, ...] = ()
    call: CallTemplate | None = None


class Tracer(TorchDispatchMode):
    """Writes a `StreamTemplate` while a step runs on meta tensors."""

    def __init__(self, template: StreamTemplate, places: Places, *, mask_has_padding: bool) -> None:
        super().__init__()
        self.template = template
        self.places = places
        self.part = "load"
        self._mask_has_padding = mask_has_padding
        self._accumulation = Accumulation.calibrated()
        self._entries: list[Entry] = []
        self._live: dict[int, tuple[int, Any]] = {}
        self._on_host: dict[int, Any] = {}
        self._answers: dict[int, bool] = {}
        self._origins: dict[Origin, int] = {}
        self._remembered: dict[Any, _Remembered] = {}
        self._workspaces: set[tuple[bool, str]] = set()
        self._next_id = 1

    def begin(self, segment: str, part: str) -> None:
        """What follows belongs to this segment of the stream and this part of the run."""
        self._entries = self.template.segments.setdefault(segment, [])
        self._entries.append(Part(part))
        self.part = part

    def notice(self, name: str) -> None:
        """The driver is told of a library that is loaded."""
        self._entries.append(Notice("driver", name))

    def hold(self, tensor: torch.Tensor, operator: str, module: str = "") -> None:
        """Follow the storage of a tensor that is there: a parameter, a buffer."""
        key = tensor.untyped_storage()._cdata
        if key in self._live or key in self._on_host or tensor.untyped_storage().nbytes() == 0:
            return
        size = (tensor.untyped_storage().nbytes(),)
        self._entries.append(Request(self._follow(tensor), size, self._origin(operator, module)))

    # -- storages ----------------------------------------------------------------------------------

    def _follow(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        id_, self._next_id = self._next_id, self._next_id + 1
        self._watch(storage, id_)
        return id_

    def _watch(self, storage: torch.UntypedStorage, id_: int) -> None:
        key = storage._cdata
        self._live[key] = (id_, weakref.ref(storage, lambda _: self._gone(key, id_)))

    def _gone(self, key: int, id_: int) -> None:
        held = self._live.get(key)
        if held is not None and held[0] == id_:
            del self._live[key]
            self._answers.pop(key, None)
            self._entries.append(Release(id_))

    def _keep_on_host(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._on_host[key] = weakref.ref(storage, lambda _: self._on_host.pop(key, None))

    def _hand_over(self, giver: torch.Tensor, taker: torch.Tensor) -> None:
        """`taker` is `giver` changed in place: one block, though meta made two storages."""
        id_, _ = self._live.pop(giver.untyped_storage()._cdata)
        self._watch(taker.untyped_storage(), id_)

    # -- operators ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name[6:]  # without "aten::"
        if func is aten._local_scalar_dense.default and args[0].device.type == "meta":
            return self._answer(args[0])
        if func._schema.is_mutable and not name.startswith(("set_", "resize_")):
            return self._write_in_place(func, args, kwargs)
        if self.part == "backward" and self._reuses_input(name, args):
            result = self._run(func, name, args, kwargs, follow=False)
            self._hand_over(args[0], result)
            return result
        result = self._run(func, name, args, kwargs, follow=True)
        if name in MATMULS:
            self._take_workspaces(name)
        elif name in ("all", "any"):
            self._answers[result.untyped_storage()._cdata] = name == "all" and not self._mask_has_padding
        return result

    def _reuses_input(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether autograd, without a mode watching, would write into the first argument."""
        if torch.is_grad_enabled() or not args or not isinstance(args[0], torch.Tensor):
            return False
        if args[0].untyped_storage()._cdata not in self._live:
            return False
        if name in SCATTERS:
            return True
        return name == "add" and isinstance(args[1], torch.Tensor) and self._accumulation.is_in_place(args[0], args[1])

    def _write_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Nothing is allocated and nothing changes shape: what is written to is the result."""
        if not _on_meta(args) and not _on_meta(tuple(kwargs.values())):
            return func(*args, **kwargs)
        returns = func._schema.returns
        if not returns:
            return None
        written = [
            kwargs[a.name] if a.name in kwargs else args[i]
            for i, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write and (a.name in kwargs or i < len(args))
        ]
        return written[0] if len(returns) == 1 else tuple(written)

    def _run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, follow: bool) -> Any:
        key = (func, _key(args), _key(tuple(kwargs.items())))
        known = self._remembered.get(key)
        if known is None:
            result = self._really_run(func, name, args, kwargs)
            known = self._remembered[key] = self._remember(name, args, kwargs, result)
        elif known.specs is None:
            result = func(*args, **kwargs)
        else:
            made = [_empty(*s.layout) if isinstance(s, _Output) else s for s in known.specs]
            result = made[0] if known.single else made
        if follow and known.specs is not None:
            self._follow_outputs(name, known, [result] if known.single else result)
        elif known.specs is None:
            self._follow_new(name, result)
        return result

    def _nonzero(self, x: torch.Tensor) -> torch.Tensor:
        """Which elements count depends on data: all of them is the dearest case, and that of full labels."""
        return torch.empty(x.numel(), x.dim(), dtype=torch.long, device="meta")

    def _really_run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "nonzero":
            return self._nonzero(args[0])
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            where = self.places.forward() if self.part == "forward" else self.places.backward()
            raise TraceError(
                f"{name} in {where or 'the model'} cannot be followed without data: {str(error).splitlines()[0]}",
                operator=name,
                module_path=where,
                hint="its shapes depend on values; describe the workload with a model that does not branch on data",
            ) from error

    def _follow_outputs(self, name: str, known: _Remembered, outputs: list[Any]) -> None:
        origin = self._origin(name, self._module())
        hosted = HOST_OUTPUTS.get(name, ())
        ids = []
        for index, tensor in enumerate(outputs):
            if not isinstance(tensor, torch.Tensor):
                ids.append(0)
            elif index in hosted:
                self._keep_on_host(tensor)
                ids.append(0)
            else:
                ids.append(self._follow(tensor) if any(known.sizes[index]) else 0)
        if known.call is not None:
            self._entries.append(Launch(known.call, tuple(ids), origin))
        else:
            self._entries.extend(Request(i, known.sizes[n], origin) for n, i in enumerate(ids) if i)

    def _follow_new(self, name: str, result: Any) -> None:
        """Outputs of an operator that really ran: views are known already, host tensors are not followed."""
        for tensor in _tensors(result):
            if tensor.device.type == "meta" and tensor.untyped_storage().nbytes():
                key = tensor.untyped_storage()._cdata
                if key not in self._live and key not in self._on_host:
                    origin = self._origin(name, self._module())
                    self._entries.append(Request(self._follow(tensor), self._size(tensor), origin))

    # -- what is remembered ------------------------------------------------------------------------

    def _remember(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> _Remembered:
        single = isinstance(result, torch.Tensor)
        outputs = [result] if single else list(result) if isinstance(result, tuple | list) else None
        inputs = {t.untyped_storage()._cdata for t in _tensors(args)} | {
            t.untyped_storage()._cdata for t in _tensors(tuple(kwargs.values()))
        }
        plain = outputs is not None and all(
            not isinstance(o, torch.Tensor)
            or (o.device.type == "meta" and o.untyped_storage()._cdata not in inputs and o.storage_offset() == 0)
            for o in outputs
        )
        if not plain:
            return _Remembered(specs=None, single=single)
        assert outputs is not None
        specs = tuple(
            _Output((tuple(o.shape), o.stride(), o.dtype)) if isinstance(o, torch.Tensor) else o for o in outputs
        )
        sizes = tuple(self._size(o) for o in outputs)
        return _Remembered(specs, single, sizes, self._call(name, args, kwargs, specs, sizes))

    def _call(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        specs: tuple[Any, ...],
        sizes: tuple[Polynomial, ...],
    ) -> CallTemplate | None:
        kernel = KERNELS.get(name)
        if kernel is None:
            return None
        outputs = tuple(self._spec(*s.layout) if isinstance(s, _Output) else None for s in specs)
        return CallTemplate(name, kernel, self._abstract(args), self._abstract(kwargs), outputs, sizes)

    def _size(self, tensor: Any) -> Polynomial:
        """Bytes of the storage under an output."""
        if not isinstance(tensor, torch.Tensor):
            return (0,)
        probe = self.template.probe
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes == tensor.numel() * tensor.element_size():
            return product(tuple(split(n, probe) for n in tensor.shape), tensor.element_size())
        k, c = split(nbytes, probe)  # padded or expanded: read off the total
        return (c, k)

    def _spec(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> SpecTemplate:
        probe = self.template.probe
        return SpecTemplate(
            tuple(split(n, probe) for n in shape),
            tuple(split(n, probe) for n in stride),
            str(dtype).removeprefix("torch."),
            dtype.itemsize,
        )

    def _abstract(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._spec(tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, list | tuple):
            return tuple(self._abstract(v) for v in value)
        if isinstance(value, dict):
            return {k: self._abstract(v) for k, v in value.items()}
        return value

    # -- what CUDA adds ----------------------------------------------------------------------------

    def _take_workspaces(self, name: str) -> None:
        """cuBLAS keeps a workspace for each thread, from its first product on; backward has its own thread."""
        profile: CudaProfile = self.template.profile
        in_backward = self.part == "backward"
        kinds = [("cublas_workspace", profile.cublas_workspace_bytes)]
        if name in WITH_BIAS:
            kinds.append(("cublaslt_workspace", profile.cublaslt_workspace_bytes))
        for kind, size in kinds:
            if (in_backward, kind) in self._workspaces:
                continue
            if kind == "cublas_workspace":
                self.notice("cublas_loaded")
            self._workspaces.add((in_backward, kind))
            self._entries.append(Request(self._next_id, (size,), self._origin(kind, "")))
            self._next_id += 1

    def _answer(self, tensor: torch.Tensor) -> Any:
        """A program asks for a value.

        Known: `all` asks whether the mask hides nothing; `any` asks whether something is wrong with the
        inputs, and nothing is; an optimizer asks for norms and overflows, which change no allocation.
        """
        known = self._answers.get(tensor.untyped_storage()._cdata)
        if known is not None:
            return known
        if self.part == "optimizer":
            return 0.0 if tensor.dtype.is_floating_point else 0
        where = self.places.forward()
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

    def _origin(self, operator: str, module: str) -> int:
        recomputes = self.part == "backward" and self.places.in_module
        origin = Origin(operator, module, "recompute" if recomputes else self.part)
        index = self._origins.get(origin)
        if index is None:
            index = self._origins[origin] = len(self.template.origins)
            self.template.origins.append(origin)
        return index


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.device.type)
    if isinstance(value, list | tuple):
        return tuple([_key(v) for v in value])
    return type(value), value if value.__hash__ is not None else repr(value)  # 1, 1.0 and True are equal


def _empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _on_meta(values: tuple[Any, ...]) -> bool:
    return any(t.device.type == "meta" for t in _tensors(values))
