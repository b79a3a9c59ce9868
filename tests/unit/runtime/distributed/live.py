"""What one rank really holds: DDP and FSDP2 run on the CPU, with PyTorch's fake process group for the others."""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vramfit.models.resolve import resolve
from vramfit.runtime.distributed.parallel import Replicas, Shards
from vramfit.runtime.distributed.votes import RankVotes
from vramfit.runtime.measurement import prepare
from vramfit.runtime.stepper import Stepper
from vramfit.step.own_loss import local
from vramfit.step.plain import make_batch
from vramfit.techniques import optimizers
from vramfit.workload import Workload


class Live(TorchDispatchMode):
    """Bytes of all storages that are alive, looked at around every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._storages: dict[int, Any] = {}

    def follow(self, *tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                storage = local(tensor.detach()).untyped_storage()
                key = storage._cdata
                gone = weakref.ref(storage, lambda _, key=key: self._storages.pop(key, None))
                self._storages.setdefault(key, gone)

    def look(self) -> None:
        held = [reference() for reference in list(self._storages.values())]
        self.peak_bytes = max(self.peak_bytes, sum(s.nbytes() for s in held if s is not None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.follow(args, kwargs)
        self.look()
        made = func(*args, **(kwargs or {}))
        self.follow(made)
        self.look()
        return made


def peaks_of(workloads: list[Workload]) -> list[int]:
    """The most that rank 0 holds in the second step of each."""
    return [_peak(workload) for workload in workloads]


def _peak(w: Workload) -> int:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=w.num_gpus, store=FakeStore())
    model = prepare(resolve(w.model, task=w.task), w)
    votes = RankVotes(0, w.num_gpus, group=dist.group.WORLD)
    ranks = Shards(model, votes) if w.parallel == "fsdp" else Replicas(model, votes)
    optimizer = optimizers.make(w.optimizer, model.parameters())
    stepper = Stepper(model, optimizer, micro_batch=w.micro_batch, seq=w.seq, ranks=ranks)
    batch = make_batch(model, w.task, "train", "ones", w.batch, w.seq, "cpu")
    batch["attention_mask"][:, 1] = 0
    with Live() as live:
        live.follow(list(model.parameters()), list(model.buffers()), getattr(ranks, "_views", []))
        stepper.step(batch)
        live.peak_bytes = 0
        stepper.step(batch)
    return live.peak_bytes
