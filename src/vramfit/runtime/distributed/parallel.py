"""How ranks share a model: `Replicas` (DistributedDataParallel) and `Shards` (FSDP2).

With `Replicas` every rank has the whole model. The passes of a window run on the model itself and talk to nobody. When
all ranks have agreed that they are through, one backward pass over the wrapper, which computes nothing, lets DDP reduce
its buckets. So memory that runs out in a pass never leaves another rank waiting in a collective; what that costs is the
overlap of the reduction with the last backward pass.

With `Shards` every rank keeps a part of each parameter. Layers are gathered and gradients scattered in the middle of a
pass. A vote goes before each of these collectives, so that a rank without memory is not waited for; all give the pass
up together.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from vramfit.errors import WorkloadError
from vramfit.models.anatomy import encoder_layers
from vramfit.runtime.distributed.votes import RankVotes
from vramfit.step.commit import Touch
from vramfit.step.own_loss import local
from vramfit.step.splitting import Alone

NUM_PRIMINGS = 2
"""DDP lays its buckets out anew after the first backward pass, by the order in which gradients came."""
ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""By the names they have from torch 2.13 on, and before."""


class _Several(Alone):
    """What ranks do alike, however they share a model."""

    votes: RankVotes

    def bring_together(self, vectors: torch.Tensor) -> None:
        """Rows of others are zeros: a sum is all of them."""
        self.votes.agree()
        with self.votes.meeting():
            dist.all_reduce(vectors)


class Replicas(_Several):
    """A model of which every rank has all. Passes talk to nobody, and gradients are the same on all ranks.

    Args:
        model: on this rank's device, with its techniques applied; rank 0's weights are sent to all.
        votes: the votes of this world.
    """

    def __init__(self, model: torch.nn.Module, votes: RankVotes) -> None:
        self.votes = votes
        self.rank, self.size = votes.rank, votes.size
        self._learned = [p for p in model.parameters() if p.requires_grad]
        self._wrapper = DistributedDataParallel(_Carrier(self._learned), gradient_as_bucket_view=True)
        self._wrapper.register_comm_hook(None, _sum)
        self._one = torch.ones((), device=self._learned[0].device)
        for _ in range(NUM_PRIMINGS):
            for parameter in self._learned:
                parameter.grad = None  # else it would keep the buckets before
            self._reduce()
        self._views = [p.grad for p in self._learned if p.grad is not None]
        assert len(self._views) == len(self._learned)
        self._used: set[int] = set()
        for index, parameter in enumerate(self._learned):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._used.add(index))
            parameter.grad = None

    def begin(self) -> None:
        """Gradients are added up where DDP reduces them: no copy of them is made."""
        self._used.clear()
        torch._foreach_zero_(self._views)
        for parameter, view in zip(self._learned, self._views, strict=True):
            parameter.grad = view

    def synchronise(self) -> None:
        """Reduce the gradients; parameters that no rank used have none, as with one process."""
        used = self.votes.any([index in self._used for index in range(len(self._learned))])
        with self.votes.meeting():
            self._reduce()
        for parameter, is_used in zip(self._learned, used, strict=True):
            if not is_used:
                parameter.grad = None

    def _reduce(self) -> None:
        self._wrapper().backward(self._one)


def _sum(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """DDP would take the mean over ranks; losses are divided by the count of the whole batch already."""
    reduced = bucket.buffer()
    work = dist.all_reduce(reduced, async_op=True)
    assert work is not None
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: reduced)
    return future


class _Carrier(torch.nn.Module):
    """What DDP wraps: the parameters, and a forward pass that touches all of them and computes nothing."""

    def __init__(self, learned: list[torch.nn.Parameter]) -> None:
        super().__init__()
        self.learned = torch.nn.ParameterList(learned)
        self._anchor = torch.zeros((), device=learned[0].device, requires_grad=True)

    def forward(self) -> torch.Tensor:
        touched: torch.Tensor = Touch.apply(self._anchor, *self.learned)
        return touched


class Shards(_Several):
    """A model of which every rank has a part.

    Args:
        model: whole, on this rank's device, with its techniques applied; rank 0's weights are sent to all. Its
            parameters are others afterwards: make the optimizer then.
        votes: the votes of this world.

    Raises:
        WorkloadError: weights that cannot be cut, such as quantized ones.
    """

    is_sharded = True

    def __init__(self, model: torch.nn.Module, votes: RankVotes) -> None:
        if any(hasattr(p, "__tensor_flatten__") for p in model.parameters()):
            raise WorkloadError(["quantized weights cannot be sharded: take parallel ddp"])
        self.votes = votes
        self.rank, self.size = votes.rank, votes.size
        self._model: Any = model
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        mesh = init_device_mesh(next(model.parameters()).device.type, (self.size,))
        for layer in encoder_layers(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # FSDP2 would take the mean over ranks; losses are divided by the count of the whole batch already
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_custom_all_gather(_Voted(votes, ALL_GATHER))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(_Voted(votes, REDUCE_SCATTER))  # type: ignore[arg-type]

    def forget(self) -> None:
        """Every layer is a shard again, and what was gathered or added up is dropped."""
        begun = self._model._get_fsdp_state()._is_root is not None  # set by the first pass
        if begun and hasattr(self._model, "reset_iter_state"):
            self._model.reset_iter_state()
        elif begun:
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    _reset(module)
        for group in self._groups():
            for part in group.fsdp_params:
                part.unsharded_accumulated_grad = None
                if hasattr(part, "_unsharded_param"):
                    part._unsharded_param.grad = None
                part.sharded_param.grad = None

    def rest(self) -> None:
        """The root keeps its parameters gathered after a forward pass: back to a shard."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def num_passes(self, own: int) -> int:
        """All ranks make as many as the one that needs most: a pass is a meeting."""
        return self.votes.agree(own)[0]

    def before_pass(self, index: int, num_passes: int) -> None:
        """Gradients are reduced in the last pass only."""
        self._model.set_requires_gradient_sync(index == num_passes - 1)

    def unscale(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """As `GradScaler.unscale_` does it, on every rank's own part; an overflow anywhere is one everywhere."""
        state = scaler._per_optimizer_states[id(optimizer)]
        grads = [local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        device = grads[0].device
        found = torch.zeros((), dtype=torch.float32, device=device)
        inverse = scaler._scale.double().reciprocal().float().to(device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
        (overflowed,) = self.votes.agree(int(found))
        found.fill_(overflowed)
        state["found_inf_per_device"] = {device: found}
        state["stage"] = type(state["stage"]).UNSCALED

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_grad_norm: float | None) -> None:
        """By the norm over all ranks."""
        if max_grad_norm is None:
            return
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        own = float(torch.nn.utils.get_total_norm(grads))
        self.votes.agree()
        norm = self.votes.sum(own * own) ** 0.5
        if norm > max_grad_norm:
            torch._foreach_mul_(grads, max_grad_norm / (norm + 1e-6))

    def _groups(self) -> Iterator[Any]:
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                yield from _groups_of(module)


def _groups_of(module: Any) -> list[Any]:
    """The parameter groups of a sharded module; one of them before torch 2.12."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _reset(module: Any) -> None:
    """What `reset_iter_state` does, for releases of torch that do not have it (before 2.13)."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = module._get_fsdp_state()
    state._training_state = TrainingState.IDLE
    context = state._state_ctx
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    for group in _groups_of(module):
        comm = group.comm_ctx
        comm.all_gather_state = None
        comm.reduce_scatter_state = None
        comm.post_forward_order.clear()
        group._all_gather_result = None
        group._post_reduce_event = None
        group._all_reduce_state = None
        group._reshard_after_forward_event = None
        group._partial_reduce_output = None
        group._post_forward_indices.clear()
        group._training_state = TrainingState.IDLE
        group._to_sharded()


class _Voted:
    """A collective of FSDP2 with a vote before it; its memory is asked for before the vote."""

    def __init__(self, votes: RankVotes, collective: Any) -> None:
        self._votes, self._collective = votes, collective

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **how: Any) -> Any:
        self._votes.agree()
        with self._votes.meeting():
            return self._collective(output_tensor, input_tensor, **how)
