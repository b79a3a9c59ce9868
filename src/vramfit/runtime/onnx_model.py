"""A model exported to ONNX, run by ONNX Runtime on the CPU in the place of its weights."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.utils import ModelOutput

from vramfit.errors import CheckpointError, MissingExtra, WorkloadError
from vramfit.models.hub import WHOLE
from vramfit.models.resolve import resolve
from vramfit.settings import SETTINGS, having
from vramfit.tasks import find_task
from vramfit.tasks.embedding import HeadParts
from vramfit.tasks.parts.pooling import head_of

if TYPE_CHECKING:
    from vramfit.runtime.device import RunDevice
    from vramfit.workload import Workload

INT8 = "int8"


def arithmetic_of(file: Path) -> str:
    """What the weights of an exported file are."""
    return "fp32" if file.name == WHOLE else INT8


def open_exported(file: Path, model: str, workload: "Workload", run_device: "RunDevice") -> torch.nn.Module:
    """An exported model in the place of the one that was exported.

    Raises:
        WorkloadError: a device, a precision or an attention that the file does not have.
        MissingExtra: ONNX Runtime is not installed.
        CheckpointError: the file is damaged.
    """
    wrong = [] if run_device.name == "cpu" else [f"device {run_device.name}"]
    changed = (name for name in having(of_weights=True) if getattr(workload, name) != SETTINGS[name].default)
    wrong += [f"{name} {getattr(workload, name)}" for name in changed]
    if wrong:
        raise WorkloadError(
            [f"{file} is an exported model, which runs on the CPU as it was exported, and not with {', '.join(wrong)}"],
            hint="take --device cpu, or the folder that it was exported from",
        )
    found = resolve(model, task=workload.task)
    made = OnnxModel(open_session(file), found.config)
    find_task(found.task).finish_model(made, found.parts)
    _fill_head(made, found.parts)
    return made


def _fill_head(model: torch.nn.Module, parts: HeadParts | None) -> None:
    """Read the weights of the layers after pooling, each of which has a file of its own.

    Raises:
        CheckpointError: it is not there, or of another layer.
    """
    head = head_of(model)
    if head is None or parts is None:
        return
    for layer, part in zip(head.layers, parts.layers, strict=False):  # unit length at the end is no layer
        if part.folder is None or not layer.state_dict():
            continue
        where = str(part.folder / "model.safetensors")
        try:
            layer.load_state_dict(load_file(where))
        except (OSError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{where} cannot be read: {reason}", file=where, hint="export it again") from None


def open_session(file: Path, num_threads: int | None = None) -> Any:
    """A session of ONNX Runtime on the CPU.

    Args:
        num_threads: None takes as many as torch does.

    Raises:
        MissingExtra: it is not installed.
        CheckpointError: the file is damaged.
    """
    try:
        import onnxruntime
    except ImportError:
        raise MissingExtra("an exported model", extra="export", package="onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads or torch.get_num_threads()
    options.log_severity_level = 3
    # threads that wait in a loop take the cores from whatever else runs on the machine
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the errors of ONNX Runtime have no common class
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{file} cannot be run: {reason}", file=str(file), hint="export it again") from None


class OnnxModel(torch.nn.Module):
    """Takes the inputs of a model of transformers, and gives its outputs by name.

    Args:
        session: of ONNX Runtime.
        config: of the model that was exported.
    """

    def __init__(self, session: Any, config: Any) -> None:
        super().__init__()
        self.config = config
        self._run = session.run
        self._inputs = tuple(one.name for one in session.get_inputs())
        self._outputs = tuple(one.name for one in session.get_outputs())

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Outputs on the host."""
        given = {name: inputs[name].numpy() for name in self._inputs if name in inputs}
        for name in self._inputs:  # the mask is of ones, and token types are zeros, where nothing is said
            if name not in given:
                fill = np.ones_like if name == "attention_mask" else np.zeros_like
                given[name] = fill(given["input_ids"])
        found = self._run(self._outputs, given)
        return ModelOutput({name: torch.from_numpy(one) for name, one in zip(self._outputs, found, strict=True)})


def input_names(model: Any) -> tuple[str, ...]:
    """The inputs that a model of transformers reads of a tokenized text."""
    known = inspect.signature(model.forward).parameters
    has_types = "token_type_ids" in known and (getattr(model.config, "type_vocab_size", 0) or 0) > 1
    return ("input_ids", "attention_mask", *(("token_type_ids",) if has_types else ()))
