"""`Phases`: whether a program is loading, in forward, backward, the optimizer's step or evaluation, told by hooks.

Only whole models are hooked, not their parts: a hook on every module would cost more than the watch may. They are
found by a hook on all modules that is there only from the end of a step to the next call of a model.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vramfit.monitor.noticing import OutputHook, RetainedGraphs
from vramfit.monitor.places import all_frames, locals_of, tensors_in
from vramfit.records.watch import WatchPhase

if TYPE_CHECKING:
    from vramfit.monitor.watch import Watch

LOOKS_ALWAYS_UNTIL, LOOKS_EVERY = 4, 16
"""Calls in training after each of which other models are looked for, and then each so many; they also are after every
step and every evaluation pass, where no backward comes whose recomputation would pass the hook module by module."""
MAX_OUTPUTS_HOOKED = 4


class Phases:
    """Follows a program through its phases, in the thread that entered it."""

    def __init__(self, listener: "Watch", guard: Callable[[Callable[[], None]], None]) -> None:
        self.current: WatchPhase = "load"
        self.step = 0
        self.num_forwards = 0
        self.retained = RetainedGraphs(guard)
        """Graphs that backward passes did not free."""
        self._listener = listener
        self._guard = guard
        self._depth = 0
        self._thread = 0
        self._models: WeakSet[torch.nn.Module] = WeakSet()
        self._handles: list[Any] = []
        self._scan: Any = None

    def start(self) -> None:
        self._thread = threading.get_ident()
        self._depth = 0
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            *(handle for model in self._models for handle in self._hook(model)),
        ]
        self.retained.start()
        self._look()

    def stop(self) -> None:
        self.retained.stop()
        self._stop_looking()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _look(self) -> None:
        if self._scan is None:
            self._scan = register_module_forward_pre_hook(self._found)

    def _stop_looking(self) -> None:
        if self._scan is not None:
            self._scan.remove()
            self._scan = None

    def _found(self, module: torch.nn.Module, args: Any) -> None:
        """Some module is called, and no model that is known is running."""
        if not self._depth and not self._is_elsewhere():
            self._guard(lambda: self._meet(module, args))

    def _meet(self, module: torch.nn.Module, args: Any) -> None:
        if module in self._models:
            self._stop_looking()
        elif next(module.parameters(), None) is not None:
            self._stop_looking()
            self._models.add(module)
            self._handles += self._hook(module)
            self._before(module, args, _keywords_of_call())

    def _hook(self, model: torch.nn.Module) -> Iterator[Any]:
        yield model.register_forward_pre_hook(_Hook(self._before), with_kwargs=True, prepend=True)
        yield model.register_forward_hook(_Hook(self._after), always_call=True)

    def _is_elsewhere(self) -> bool:
        """Whether this is another thread, or backward, where a checkpoint calls modules once more."""
        return threading.get_ident() != self._thread or torch._C._current_graph_task_id() != -1

    def _before(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_elsewhere():
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._stop_looking()
        self.num_forwards += 1
        inputs = {**{str(i): value for i, value in enumerate(args)}, **kwargs}

        def tell() -> None:
            self._change("forward" if model.training else "evaluation")
            self._listener.on_forward(model, inputs)

        self._guard(tell)

    def _after(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._depth or self._is_elsewhere():
            return
        self._depth -= 1
        if self._depth:
            return
        self._guard(lambda: self._ended(model, output))
        if not model.training or self.num_forwards < LOOKS_ALWAYS_UNTIL or self.num_forwards % LOOKS_EVERY == 0:
            self._look()

    def _ended(self, model: torch.nn.Module, output: Any) -> None:
        self._listener.on_output(model, output)
        number, hooked = self.num_forwards, 0
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf and hooked < MAX_OUTPUTS_HOOKED:
                tensor.register_hook(OutputHook(tensor.grad_fn, number, self._on_gradient))
                hooked += 1

    def _on_gradient(self, hook: OutputHook) -> None:
        self._guard(lambda: self._backward(hook))

    def _backward(self, hook: OutputHook) -> None:
        """A gradient has come to a model's output."""
        if not self._handles:
            return
        self.retained.backward(hook)
        self._listener.on_backward(hook.forward_number)
        if self.current != "backward":
            self._change("backward")
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        if self._handles and self.current == "backward":
            self._guard(lambda: self._change("other"))

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == self._thread:
            self._guard(lambda: self._change("optimizer"))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self.step += 1

        def tell() -> None:
            self._change("other")
            self._listener.on_step(optimizer)

        self._guard(tell)
        self._look()

    def _change(self, new: WatchPhase) -> None:
        old, self.current = self.current, new
        self._listener.on_phase(old, new)


class _Hook:
    """A hook that stays behind when its model is copied or saved; without vramfit too, the copy can be read."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # of the standard library: takes anything, does nothing


def _keywords_of_call() -> dict[str, Any]:
    """Keyword arguments of the call that a hook on all modules was told of without them."""
    for frame in islice(all_frames(sys._getframe(2)), 4):
        given = locals_of(frame).get("kwargs")
        if isinstance(given, dict):
            return given
    return {}
