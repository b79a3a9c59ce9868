"""The checks against machines that are told of, not had."""

from dataclasses import replace

import pytest

from vramfit.devices.probe import GPUProcess, PresentGPU
from vramfit.doctor.checkup import check_environment, runs_on
from vramfit.doctor.environment import Environment, TorchBuild, gather
from vramfit.records.finding import Finding
from vramfit.units import GIB

T4 = PresentGPU(
    index=0,
    name="Tesla T4",
    uuid="GPU-0",
    compute_capability=(7, 5),
    total_bytes=15 * GIB,
    free_bytes=14 * GIB,
    processes=(),
    driver_version="535.104.05",
    cuda_version="12.2",
)
CUDA_13 = TorchBuild(version="2.13.0+cu130", cuda="13.0", architectures=("sm_75", "sm_80", "sm_90", "compute_120"))
CUDA_12 = replace(CUDA_13, version="2.13.0+cu126", cuda="12.6")
HEALTHY = Environment(
    python=(3, 11, 7),
    system="Linux x86_64",
    torch=CUDA_12,
    packages={"torch": "2.13.0", "transformers": "5.22.2", "tokenizers": "0.23.3"},
    requirements={
        "vramfit": ("torch>=2.10", "transformers>=5.17", 'fastapi>=0.115; extra == "web"'),
        "transformers": ("tokenizers<0.24,>=0.22.0",),
    },
    gpus=(T4,),
)


def findings(env: Environment, *severities: str) -> list[Finding]:
    return [f for f in check_environment(env) if f.severity in (severities or ("warning", "error"))]


def test_a_healthy_machine_has_nothing_to_mend() -> None:
    assert findings(HEALTHY) == []


def test_no_gpu_is_said_plainly_and_is_no_error() -> None:
    found = findings(replace(HEALTHY, gpus=()), "info")
    assert any("no NVIDIA GPU here" in f.what for f in found)
    assert findings(replace(HEALTHY, gpus=()), "error") == []


def test_a_torch_newer_than_the_driver_says_which_of_the_two_to_change() -> None:
    (error,) = findings(replace(HEALTHY, torch=CUDA_13))
    assert error.check == "torch.driver"
    assert "CUDA 13.0" in error.what
    assert "driver 535.104.05 runs CUDA 12.2 at most" in error.what
    assert "upgrade the driver to 580" in error.fix
    assert error.fix.endswith("change torch: install a build for CUDA 12")  # any 12.x runs on a driver of 12.2


def test_a_newer_minor_version_of_the_same_cuda_runs() -> None:
    assert findings(replace(HEALTHY, torch=CUDA_12)) == []


def test_a_torch_without_cuda_beside_a_gpu_is_an_error() -> None:
    (error,) = findings(replace(HEALTHY, torch=TorchBuild(version="2.13.0+cpu", cuda=None)))
    assert "built without CUDA, but this machine has Tesla T4" in error.what
    assert error.fix == "change torch: install a build for CUDA 12"


@pytest.mark.parametrize(
    ("capability", "says"), [((3, 7), "older release"), ((7, 0), "older release"), ((12, 1), None)]
)
def test_a_gpu_that_torch_has_no_code_for_is_an_error(capability: tuple[int, int], says: str | None) -> None:
    found = findings(replace(HEALTHY, gpus=(replace(T4, compute_capability=capability),)))
    assert [says in f.fix for f in found if says] == ([True] if says else [])


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (("sm_80",), (8, 0), True),
        (("sm_80",), (8, 9), True),
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("sm_80", "compute_80"), (9, 0), True),
        (("sm_90a",), (9, 0), True),
        ((), (9, 0), False),
    ],
)
def test_native_code_runs_within_a_major_version_and_portable_code_above(
    architectures: tuple[str, ...], capability: tuple[int, int], runs: bool
) -> None:
    assert runs_on(architectures, capability) is runs


def test_other_users_of_the_gpu_are_named() -> None:
    busy = replace(T4, processes=(GPUProcess(pid=77, used_bytes=3 * GIB, name="python"),))
    (warning,) = findings(replace(HEALTHY, gpus=(busy,)))
    assert "python (pid 77, 3.00 GiB)" in warning.what
    assert "--memory 14.00GiB" in warning.fix


def test_the_own_process_is_not_another_user() -> None:
    busy = replace(T4, processes=(GPUProcess(pid=77, used_bytes=3 * GIB, name="python"),))
    assert findings(replace(HEALTHY, gpus=(busy,), process_id=77)) == []


def test_a_package_outside_what_transformers_asks_for_is_an_error_with_the_command() -> None:
    packages = {**HEALTHY.packages, "tokenizers": "0.21.0"}
    (error,) = findings(replace(HEALTHY, packages=packages))
    assert "tokenizers 0.21.0; transformers needs tokenizers" in error.what
    assert error.fix.startswith('pip install "tokenizers')


def test_a_missing_package_and_a_missing_torch_are_errors() -> None:
    (error,) = findings(replace(HEALTHY, packages={"torch": "2.13.0", "transformers": "5.22.2"}))
    assert "tokenizers is not installed" in error.what
    (fatal,) = findings(replace(HEALTHY, torch=None, packages={**HEALTHY.packages}))
    assert fatal.fatal
    assert "torch is not installed" in fatal.what


def test_a_missing_extra_is_only_information() -> None:
    (info,) = [f for f in check_environment(HEALTHY) if f.check == "extra.web"]
    assert (info.severity, info.fix) == ("info", 'pip install "vramfit[web]"')


def test_an_old_python_is_an_error() -> None:
    (error,) = findings(replace(HEALTHY, python=(3, 9, 1)))
    assert "Python 3.9.1" in error.what


def test_variables_that_disagree_are_a_warning() -> None:
    variables = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
    }
    (warning,) = findings(replace(HEALTHY, variables=variables))
    assert "both set and differ" in warning.what


def test_caching_turned_off_is_an_error() -> None:
    (error,) = findings(replace(HEALTHY, variables={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}))
    assert "predictions do not hold" in error.why


def test_this_machine_can_be_looked_at() -> None:
    env = gather()
    assert env.torch is not None
    assert env.packages["transformers"]
    assert check_environment(env)
