"""`Subject`: what every check looks at: the configuration, the model it describes, the checkpoint beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vramfit.checkpoints.entry import TensorEntry
from vramfit.checkpoints.files import CheckpointFiles
from vramfit.checkpoints.matching import Matching
from vramfit.models import ResolvedModel, backbone, head_parameters

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One checkpoint under inspection."""

    resolved: ResolvedModel
    """The configuration and the class of the task."""
    config_data: Mapping[str, Any]
    """The same configuration as it stands in the file."""
    model: "nn.Module"
    """The model on the meta device."""
    files: CheckpointFiles
    """The weight files."""
    entries: Sequence[TensorEntry]
    """Their tensors."""
    matching: Matching
    """The tensors laid beside the model."""
    num_labels_asked: int | None = None
    """The head size that was asked for, where one was."""

    @cached_property
    def state(self) -> "Mapping[str, torch.Tensor]":
        """The model's tensors by name; tied ones are one object."""
        return self.model.state_dict(keep_vars=True)

    @cached_property
    def head(self) -> frozenset[str]:
        """Names outside the backbone, tied ones included."""
        inside = {id(tensor) for tensor in backbone(self.model).state_dict(keep_vars=True).values()}
        outside = {name for name, tensor in self.state.items() if id(tensor) not in inside}
        return frozenset(outside | set(head_parameters(self.model)))

    @cached_property
    def buffers(self) -> frozenset[str]:
        """Names of tensors that are computed, not learned."""
        return frozenset(name for name, _ in self.model.named_buffers())

    @cached_property
    def class_name(self) -> str:
        """The transformers class that the task needs."""
        return self.resolved.model_class.__name__

    @cached_property
    def saved_architectures(self) -> tuple[str, ...]:
        """The classes that the configuration says the checkpoint was saved from."""
        named = self.config_data.get("architectures")
        return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()
