"""How DDP really lays its buckets out, with PyTorch's fake process group for the other ranks."""

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from vramfit.models.resolve import resolve
from vramfit.runtime.distributed.accord import Accord
from vramfit.runtime.distributed.replicas import Replicas
from vramfit.runtime.preparation import prepare
from vramfit.workload import Workload


def buckets_of(name: str) -> list[tuple[int, list[int]]]:
    """Bytes of every bucket, and the numbers of the parameters whose gradients lie in it."""
    w = Workload(model=name, batch=4, seq=16, num_gpus=2, parallel="ddp", loop="stepper")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    ranks = Replicas(prepare(resolve(w.model, task=w.task), w), Accord(0, 2, group=dist.group.WORLD))
    found: dict[int, tuple[int, list[int]]] = {}
    for number, view in enumerate(ranks._views):
        storage = view.untyped_storage()
        found.setdefault(storage._cdata, (storage.nbytes(), []))[1].append(number)
    return sorted(found.values())
