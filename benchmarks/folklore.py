"""What is said to save memory and does not, or not like that: each shown by running it; see `remedies.py`."""

from collections.abc import Callable
from typing import Any

import fine_tuning
from fine_tuning import Data, Options
from remedy_cases import REMEDIES, plain_settings

TEXTS = ["a charming and often affecting journey", "unflinchingly bleak and desperate"] * 16


def quantize_dynamic(options: Options) -> Data:
    """`torch.quantization.quantize_dynamic` on a model that is on the GPU; beside it, int8 by `vramfit.load`."""
    import torch

    import vramfit

    model, inputs = _model(options), _inputs(options)
    before = _allocated()
    said: dict[str, Any] = {"allocated_before_bytes": before}
    try:
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
        said["weights_on"] = sorted({str(_device_of(module)) for module in model.modules() if _device_of(module)})
        said["allocated_after_bytes"] = _allocated()
        with torch.no_grad():
            model(**inputs)
        said["ran"] = True
    except (RuntimeError, NotImplementedError, ValueError) as error:
        said |= {"ran": False, "refused": _line(error)}
    del model
    _restart()
    loaded, _ = vramfit.load(
        options.model, task="sequence-classification", num_labels=2, quantize="int8", device=_device(options)
    )
    with torch.no_grad():
        loaded(**inputs)
    return said | {"instead_allocated_bytes": _peak()}


def quantization_config(options: Options) -> Data:
    """`from_pretrained(..., quantization_config="fp16")`; beside it, `dtype=torch.float16`."""
    import torch
    from transformers import AutoModelForSequenceClassification

    said: dict[str, Any] = {}
    try:
        model = AutoModelForSequenceClassification.from_pretrained(options.model, quantization_config="fp16")
        said |= {"ran": True, "dtypes": sorted({str(p.dtype) for p in model.parameters()})}
    except Exception as error:  # whatever it raises is the finding
        said |= {"ran": False, "refused": _line(error)}
    _restart()
    half = AutoModelForSequenceClassification.from_pretrained(options.model, dtype=torch.float16).to(_device(options))
    return said | {
        "instead_allocated_bytes": _allocated(),
        "instead_dtypes": sorted({str(p.dtype) for p in half.parameters()}),
    }


def half_with_adamw(options: Options) -> Data:
    """`model.half()` trained by AdamW as in fp32: eps 1e-8 is zero in fp16; and a `GradScaler` refuses."""
    import torch

    settings = plain_settings(REMEDIES[0], "sst2", options) | {"seed": options.seeds[0]}
    settings |= fine_tuning.QUICK if options.quick else {}
    trained = fine_tuning.plain(**settings, half=True)
    weight = torch.nn.Parameter(torch.ones(2, 2, device=_device(options), dtype=torch.float16))
    optimizer, scaler = torch.optim.AdamW([weight]), torch.amp.GradScaler(_device(options))
    scaler.scale((weight.sum() * 1.0).float()).backward()
    try:
        scaler.unscale_(optimizer)
        refusal = None
    except ValueError as error:
        refusal = _line(error)
    return {**trained, "eps_in_fp16": float(torch.tensor(1e-8, dtype=torch.float16)), "scaler_error": refusal}


def frozen_input(options: Options) -> Data:
    """`x.requires_grad = False` before a pass; beside it, `torch.no_grad()`."""
    import torch

    model, inputs = _model(options), _inputs(options)
    peaks = {}
    for name in ("as it is", "x.requires_grad = False", "no_grad"):
        _restart()
        if name.startswith("x"):
            inputs["input_ids"].requires_grad = False
        with torch.set_grad_enabled(name != "no_grad"):
            outputs = model(**inputs)
        peaks[name] = _peak()
        requires_grad = outputs.logits.requires_grad
        peaks[f"{name}: output requires grad"] = requires_grad
        del outputs
    return peaks


FOLKLORE: dict[str, Callable[[Options], Data]] = {
    "quantize_dynamic on a GPU": quantize_dynamic,
    'quantization_config="fp16"': quantization_config,
    "model.half() with AdamW": half_with_adamw,
    "x.requires_grad = False": frozen_input,
}


def _device(options: Options) -> str:
    return "cpu" if options.device == "emulated" else str(options.device)


def _model(options: Options) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2).to(_device(options)).eval()


def _inputs(options: Options) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    inputs = tokenizer(TEXTS, padding="max_length", max_length=128, truncation=True, return_tensors="pt")
    return dict(inputs.to(_device(options)))


def _device_of(module: Any) -> Any:
    """Where a quantized layer has its weights; None for any other."""
    packed = getattr(module, "_packed_params", None)
    return None if packed is None else packed._weight_bias()[0].device if hasattr(packed, "_weight_bias") else None


def _allocated() -> int | None:
    import torch

    return torch.cuda.memory_allocated() if torch.cuda.is_available() else None


def _peak() -> int | None:
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def _restart() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
