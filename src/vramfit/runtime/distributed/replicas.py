"""`Replicas`: every rank has the whole model; DistributedDataParallel adds up the gradients, once a window.

The passes of a window run on the model itself and talk to nobody. When all ranks have agreed that they are through,
one backward pass over the wrapper, which computes nothing, lets DDP reduce its buckets. So memory that runs out in a
pass never leaves another rank waiting in a collective; what that costs is the overlap of the reduction with the last
backward pass.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from vramfit.runtime.distributed.accord import Accord
from vramfit.step.ranks import Alone
from vramfit.step.touch import Touch

NUM_PRIMINGS = 2
"""DDP lays its buckets out anew after the first backward pass, by the order in which gradients came."""


class Replicas(Alone):
    """A model of which every rank has all. Passes talk to nobody, and gradients are the same on all ranks.

    Args:
        model: on this rank's device, with its techniques applied; rank 0's weights are sent to all.
        accord: the votes of this world.
    """

    accord: Accord

    def __init__(self, model: torch.nn.Module, accord: Accord) -> None:
        self.accord = accord
        self.rank, self.size = accord.rank, accord.size
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
        used = self.accord.any([index in self._used for index in range(len(self._learned))])
        with self.accord.meeting():
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
