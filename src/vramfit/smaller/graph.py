"""A model as an ONNX file: exported with batch and length left open, and quantized to int8."""

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from vramfit.errors import MissingExtra, VramfitError
from vramfit.quiet import CHATTY, quiet
from vramfit.runtime.onnx_model import input_names

PACKAGES = ("onnx", "onnxruntime", "onnxscript")
OPSET = 18
"""The newest that torch 2.13 writes without converting."""
QUANTIZED_TYPES = ["MatMul", "Gemm"]
"""Operators whose weights become int8; embeddings and norms stay as they are."""
ODD_BATCH, ODD_LENGTH = 3, 7
"""Of the example that is traced: neither is a number that code would treat by itself."""


def check_packages() -> None:
    """Raises MissingExtra where a package that exports is not installed."""
    missing = next((name for name in PACKAGES if find_spec(name) is None), None)
    if missing is not None:
        raise MissingExtra("vramfit export", extra="export", package=missing)


class _Traced(torch.nn.Module):
    """A model of transformers with its outputs as a plain tuple; a hook that pools them is not called."""

    def __init__(self, model: Any, outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self._outputs = model, outputs

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        more = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        found = self.model.forward(input_ids=input_ids, attention_mask=attention_mask, **more)
        return tuple(found[name] for name in self._outputs)


def write_graph(model: Any, file: Path, max_length: int) -> tuple[str, ...]:
    """Export a model; gives the names of its outputs.

    Args:
        max_length: tokens of a text at most.

    Raises:
        VramfitError: torch cannot export this family.
    """
    names = input_names(model)
    length = min(ODD_LENGTH, max_length)
    ids = torch.ones(ODD_BATCH, length, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[-1, length // 2 + 1 :] = 0
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    inputs = {name: given[name] for name in names}
    with torch.no_grad():
        outputs = _own_outputs(model.forward(**inputs))
    batch, seq = torch.export.Dim("batch"), torch.export.Dim("sequence", max=max(max_length, length))
    try:
        with _silence():
            made = torch.onnx.export(
                _Traced(model, outputs).eval(),
                kwargs=inputs,
                dynamic_shapes={name: {0: batch, 1: seq} for name in names},
                input_names=list(names),
                output_names=list(outputs),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
            assert made is not None
            made.save(str(file))
            _forget_shapes(file)
    except Exception as error:  # the exporter has many classes of errors, and no common one
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        family = getattr(model.config, "model_type", type(model).__name__)
        raise VramfitError(
            f"{family} models cannot be exported: torch.onnx says {reason.strip()[:200]}",
            hint="try --attention eager; where that fails too, torch does not export this family yet",
        ) from None
    return outputs


def _forget_shapes(file: Path) -> None:
    """Take the shapes of inner values out of a file: torch leaves some of weights that it has transposed since, which
    the quantizer then takes for a contradiction."""
    import onnx

    made = onnx.load(file, load_external_data=False)
    del made.graph.value_info[:]
    onnx.save(made, file)


def _own_outputs(output: Any) -> tuple[str, ...]:
    """Outputs that answers are made of: those of a head, or the vectors of all tokens."""
    names = [name for name, value in output.items() if isinstance(value, torch.Tensor)]
    return ("last_hidden_state",) if "last_hidden_state" in names else tuple(names)


def quantize(file: Path, output: Path, calibration: Iterable[dict[str, Any]] | None = None) -> None:
    """Write an exported file with int8 weights.

    Args:
        calibration: inputs whose activations give the ranges, which are then fixed; None finds the range of each batch
            while it runs.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static

    common: dict[str, Any] = {
        "op_types_to_quantize": QUANTIZED_TYPES,
        "per_channel": True,
        "weight_type": QuantType.QInt8,
        "extra_options": {"MatMulConstBOnly": True},
    }
    with _silence():
        if calibration is None:
            quantize_dynamic(file, output, **common)
        else:
            quantize_static(file, output, _Reader(calibration), activation_type=QuantType.QUInt8, **common)


class _Reader:
    """Inputs one after another, as `onnxruntime.quantization` asks for them."""

    def __init__(self, inputs: Iterable[dict[str, Any]]) -> None:
        self._left = iter(inputs)

    def get_next(self) -> dict[str, Any] | None:
        """The next ones; None at the end."""
        return next(self._left, None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._left

    def __len__(self) -> int:
        return 0


@contextmanager
def _silence() -> Iterator[None]:
    """The exporter and the quantizer log what a user cannot change."""
    with warnings.catch_warnings(), quiet(*CHATTY, "torch.onnx", "onnxscript", "onnx_ir"):
        warnings.simplefilter("ignore")
        root = logging.getLogger()
        level = root.level
        root.setLevel(logging.ERROR)
        try:
            yield
        finally:
            root.setLevel(level)
