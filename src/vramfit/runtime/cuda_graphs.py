"""Calls recorded as CUDA graphs; a call that cannot be recorded leaves torch as it was."""

from collections.abc import Callable
from contextlib import suppress

import torch

_UNENDED: list[torch.cuda.CUDAGraph] = []
"""Captures that torch could not end: its allocators may ask them later on whose memory a stream takes."""


class CudaRecords:
    """Calls as CUDA graphs, all of them in the memory of one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.forget()
        self._prepare()

    def forget(self) -> None:
        """Give its memory back, and all that is cached beside."""
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _prepare(self) -> None:
        """Have cuBLAS take its workspaces of this stream now, forward's and backward's: in a graph's memory, they would
        keep it for ever."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream), torch.enable_grad():
            layer = torch.nn.Linear(16, 16, dtype=torch.bfloat16, device=self._device)
            made = layer(torch.zeros(16, 16, dtype=torch.bfloat16, device=self._device, requires_grad=True))
            made.sum().backward()
        torch.cuda.synchronize(self._device)

    def __call__(self, call: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record a call, which does nothing yet.

        What others of the process do meanwhile is their own affair (`thread_local`): a loader may be at work.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                call()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture in which something failed.

        Where CUDA has made it invalid, `capture_end` raises before it tells the allocator and the random generator
        (CUDAGraph.cpp, 2.11): from then on `empty_cache` fails, and so does every dropout.
        """
        with suppress(Exception):
            graph.capture_end()
            return
        with suppress(Exception):  # the first of these fails where it had got beyond that
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
            _UNENDED.append(graph)
        with suppress(Exception):  # a capture that ends well takes the generator along
            other = torch.cuda.CUDAGraph()
            other.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=self._device)
            other.capture_end()
