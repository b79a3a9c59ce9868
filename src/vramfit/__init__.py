"""vramfit: predict, plan and run BERT-class models inside a GPU memory budget.

Importing this package is light: names are resolved on first use, and nothing here imports torch or
sets an environment variable.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vramfit.records.finding import use_renderer as _use_renderer

__version__ = "0.1.0"
_use_renderer(lambda: import_module("vramfit.report.display"))

if TYPE_CHECKING:
    from vramfit.emulator.gpu import EmulatedGPU
    from vramfit.errors import (
        BudgetExceeded,
        CheckpointError,
        DataError,
        MissingExtra,
        NoPlanFits,
        RecoveryExhausted,
        TraceError,
        UnknownGPU,
        UnknownModel,
        VramfitError,
        WorkloadError,
    )
    from vramfit.estimator.predict import estimate
    from vramfit.integrations.drop_ins import fit_encoder, fit_reranker
    from vramfit.loader.load import load
    from vramfit.planner.choose import max_batch
    from vramfit.planner.plan import plan
    from vramfit.records.estimate import Estimate, MaxBatch
    from vramfit.records.finding import Finding, LoadReport
    from vramfit.records.plan import Plan
    from vramfit.runtime.distributed.processes import company
    from vramfit.runtime.encoding.encode import encode
    from vramfit.runtime.stepper import Stepper
    from vramfit.runtime.watching import watch
    from vramfit.smaller.comparison import compare
    from vramfit.smaller.distillation import distill
    from vramfit.techniques.application import make_optimizer, prepare
    from vramfit.workload import Workload

_HOME = {
    "BudgetExceeded": "vramfit.errors",
    "CheckpointError": "vramfit.errors",
    "DataError": "vramfit.errors",
    "EmulatedGPU": "vramfit.emulator.gpu",
    "Estimate": "vramfit.records.estimate",
    "Finding": "vramfit.records.finding",
    "LoadReport": "vramfit.records.finding",
    "MaxBatch": "vramfit.records.estimate",
    "MissingExtra": "vramfit.errors",
    "NoPlanFits": "vramfit.errors",
    "Plan": "vramfit.records.plan",
    "RecoveryExhausted": "vramfit.errors",
    "Stepper": "vramfit.runtime.stepper",
    "TraceError": "vramfit.errors",
    "UnknownGPU": "vramfit.errors",
    "UnknownModel": "vramfit.errors",
    "VramfitError": "vramfit.errors",
    "Workload": "vramfit.workload",
    "WorkloadError": "vramfit.errors",
    "company": "vramfit.runtime.distributed.processes",
    "compare": "vramfit.smaller.comparison",
    "distill": "vramfit.smaller.distillation",
    "encode": "vramfit.runtime.encoding.encode",
    "estimate": "vramfit.estimator.predict",
    "fit_encoder": "vramfit.integrations.drop_ins",
    "fit_reranker": "vramfit.integrations.drop_ins",
    "load": "vramfit.loader.load",
    "make_optimizer": "vramfit.techniques.application",
    "max_batch": "vramfit.planner.choose",
    "plan": "vramfit.planner.plan",
    "prepare": "vramfit.techniques.application",
    "watch": "vramfit.runtime.watching",
}

__all__ = [
    "BudgetExceeded",
    "CheckpointError",
    "DataError",
    "EmulatedGPU",
    "Estimate",
    "Finding",
    "LoadReport",
    "MaxBatch",
    "MissingExtra",
    "NoPlanFits",
    "Plan",
    "RecoveryExhausted",
    "Stepper",
    "TraceError",
    "UnknownGPU",
    "UnknownModel",
    "VramfitError",
    "Workload",
    "WorkloadError",
    "__version__",
    "company",
    "compare",
    "distill",
    "encode",
    "estimate",
    "fit_encoder",
    "fit_reranker",
    "load",
    "make_optimizer",
    "max_batch",
    "plan",
    "prepare",
    "watch",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'vramfit' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
