"""`/opt/ml` as SageMaker makes it, in a folder of the test's own."""

import json
from pathlib import Path
from typing import Any

from tests.unit.runtime.training.small_runs import write_classes, write_model


def write_job(base: Path, *, channels: bool = True, **hyperparameters: Any) -> Path:
    """Configuration, data, a model; values of hyperparameters are texts, as SageMaker has them."""
    config = base / "input" / "config"
    config.mkdir(parents=True)
    (base / "model").mkdir()
    usual = {"model": str(base.parent / "source"), "epochs": "2", "batch": "8", "lr": "1e-3", "device": "cpu"}
    given = {name.replace("_", "-"): str(value) for name, value in (usual | hyperparameters).items()}
    (config / "hyperparameters.json").write_text(json.dumps(given))
    names = ("train", "validation") if channels else ()
    (config / "inputdataconfig.json").write_text(json.dumps({name: {"TrainingInputMode": "File"} for name in names}))
    resources = {"current_host": "algo-1", "hosts": ["algo-1"], "current_instance_type": "ml.g4dn.xlarge"}
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    for seed, name in enumerate(names):
        (base / "input" / "data" / name).mkdir(parents=True)
        write_classes(base / "input" / "data" / name / "rows.csv", seed=seed)
    if not (base.parent / "source").exists():
        write_model(base.parent / "source")
    return base
