"""On a real GPU: techniques of training, predicted and run.

The runs go side by side, each in a process of its own: peaks are a process's own. The predicted requests are never
below what is requested, the allocated peak is within 1 % (where segments come to lie moves it a little, either way),
and what is reserved stays under the bound that plans rely on.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from vramfit.devices.catalogue import match_gpu
from vramfit.estimator.predict import estimate
from vramfit.records.estimate import Estimate
from vramfit.records.measurement import Measurement
from vramfit.runtime.measurement import measure
from vramfit.workload import Workload

pytestmark = pytest.mark.gpu

MODEL = "bert-base-uncased"
SHAPE: dict[str, Any] = {"batch": 16, "seq": 128}
CASES: dict[str, dict[str, Any]] = {
    "lora": {"lora": 8},
    "lora, int8 base": {"lora": 8, "quantize": "int8", "precision": "amp-bf16"},
    "lora, int8 base, bf16, checkpointing": {
        "lora": 8,
        "quantize": "int8",
        "precision": "bf16",
        "checkpointing": "full",
    },
    "int8, frozen backbone": {"quantize": "int8", "freeze": "backbone"},
    "int8, frozen encoder": {"quantize": "int8", "freeze": "encoder", "precision": "amp-bf16"},
    "adamw-8bit": {"optimizer": "adamw-8bit", "precision": "amp-bf16"},
    "adamw-8bit, small batch": {"optimizer": "adamw-8bit", "batch": 2},
    "adafactor": {"optimizer": "adafactor", "precision": "amp-bf16"},
    "sgd": {"optimizer": "sgd"},
}
MAX_ERROR = 0.01
PHASES = ("load", "first_step", "steady_step")


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[Measurement]]]:
    with ThreadPoolExecutor(len(CASES)) as pool:
        yield {
            name: pool.submit(measure, Workload(model=MODEL, **(SHAPE | keywords))) for name, keywords in CASES.items()
        }


def predicted(name: str, run: Measurement) -> Estimate:
    gpu = match_gpu(run.gpu, run.total_memory_bytes)
    assert gpu is not None, f"{run.gpu} is not in the catalogue"
    return estimate(MODEL, **(SHAPE | CASES[name]), gpu=gpu.name)


@pytest.mark.parametrize("name", CASES)
def test_a_technique_takes_what_was_predicted(name: str, runs: dict[str, "Future[Measurement]"]) -> None:
    run = runs[name].result()
    made = predicted(name, run)
    assert run.out_of_memory is None
    for phase in PHASES:
        expected, seen = made.phases[phase], run.phases[phase]
        said = f"{phase}: {expected} predicted, {seen} seen"
        assert expected.peak_requested_bytes >= seen.peak_requested_bytes, said
        assert abs(expected.peak_allocated_bytes / seen.peak_allocated_bytes - 1) <= MAX_ERROR, said
    assert run.reserved_bytes <= made.safe_reserved_bytes
