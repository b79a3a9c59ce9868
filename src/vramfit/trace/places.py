"""Where in the model an operator belongs: the module whose forward runs, or whose gradient is computed."""

from types import TracebackType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Places:
    """Follows module calls; in backward, finds the module that recorded the running autograd node."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = [""]
        self._by_sequence: dict[int, str] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> "Places":
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1]))

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if len(self._stack) > 1:
            self._stack.pop()

    def clear(self) -> None:
        """Forget a pass that has ended, or that an error cut short."""
        self._by_sequence.clear()
        del self._stack[1:]

    @property
    def in_module(self) -> bool:
        """Whether a module's forward is running; in backward, that is recomputation."""
        return len(self._stack) > 1

    def forward(self) -> str:
        """The module running now; remembered for the autograd node that has just been made."""
        name = self._stack[-1]
        self._by_sequence[torch.autograd._get_sequence_nr()] = name  # type: ignore[attr-defined]
        return name

    def backward(self) -> str:
        """The module that recorded the node running now; a module being recomputed comes first."""
        if self.in_module:
            return self.forward()
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        # the node took its number just before the operator ran, when the next number was one higher
        return self._by_sequence.get(node._sequence_nr() + 1, "")
