"""The GPU catalogue: what its figures hold to, and how names find their GPU."""

import subprocess
import sys

import pytest

from vramfit.devices.catalogue import (
    DEFAULT_ARCHITECTURE,
    GPU,
    Instance,
    all_gpus,
    all_instances,
    find_gpu,
    find_instance,
    match_gpu,
)
from vramfit.errors import UnknownGPU
from vramfit.records.codec import from_data, to_data
from vramfit.units import GIB, MIB

FIGURES = [
    "compute_capability",
    "num_multiprocessors",
    "total_memory_bytes",
    "memory_basis",
    "nominal_memory_bytes",
    "context_bytes",
    "context_basis",
    "memory_bandwidth_bytes_per_s",
    "peak_fp32",
    "peak_tf32",
    "peak_fp16",
    "peak_bf16",
    "peak_fp8",
]

each_gpu = pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
each_instance = pytest.mark.parametrize("instance", all_instances(), ids=lambda instance: instance.name)


def test_the_catalogue_has_at_least_45_gpus() -> None:
    assert len(all_gpus()) >= 45


def test_no_two_gpus_share_a_name_or_an_alias() -> None:
    names = [name for gpu in all_gpus() for name in (gpu.name, *gpu.aliases)]
    assert len(names) == len(set(names))


@each_gpu
def test_every_figure_that_is_given_names_its_source(gpu: GPU) -> None:
    for figure in FIGURES:
        assert (getattr(gpu, figure) is None) == (gpu.source_of(figure) is None), figure


@each_gpu
def test_no_source_is_for_a_figure_that_does_not_exist(gpu: GPU) -> None:
    named = {figure for figures in gpu.sources for figure in figures.split(", ")}
    assert named <= set(FIGURES)


@each_gpu
def test_cuda_has_less_memory_than_is_sold_but_not_much_less(gpu: GPU) -> None:
    assert 0.88 * gpu.nominal_memory_bytes < gpu.total_memory_bytes < gpu.nominal_memory_bytes


@each_gpu
def test_a_memory_that_was_not_seen_says_how_it_was_worked_out(gpu: GPU) -> None:
    source = gpu.source_of("total_memory_bytes")
    assert source is not None
    if gpu.memory_basis == "nominal":
        assert any(word in source for word in ("less", "like", "same size", "as on"))


@each_gpu
def test_figures_lie_in_ranges_that_real_gpus_have(gpu: GPU) -> None:
    assert 10 <= gpu.num_multiprocessors <= 200
    assert gpu.memory_bandwidth_bytes_per_s is not None
    assert 100e9 < gpu.memory_bandwidth_bytes_per_s < 10e12
    assert gpu.peak_fp32 is None or 1e12 < gpu.peak_fp32 < 200e12
    assert gpu.peak_fp16 is None or gpu.peak_fp32 is None or gpu.peak_fp32 < gpu.peak_fp16 < 3e15


@each_gpu
def test_a_rate_is_given_only_where_the_architecture_has_it(gpu: GPU) -> None:
    assert gpu.compute_capability >= (8, 0) or gpu.peak_tf32 is None
    assert gpu.supports_bf16 or gpu.peak_bf16 is None
    assert gpu.compute_capability >= (8, 9) or gpu.peak_fp8 is None
    assert gpu.peak_bf16 is None or gpu.peak_bf16 == gpu.peak_fp16


@each_gpu
def test_every_name_of_a_gpu_finds_it(gpu: GPU) -> None:
    for name in (gpu.name, gpu.title, *gpu.aliases, gpu.name.upper(), gpu.name.replace("-", "_")):
        assert find_gpu(name) is gpu


@each_gpu
def test_the_drivers_name_and_memory_match_the_gpu(gpu: GPU) -> None:
    for name in gpu.reported_names:
        assert match_gpu(name, gpu.total_memory_bytes) is gpu


@each_gpu
def test_a_gpu_survives_json(gpu: GPU) -> None:
    assert from_data(GPU, to_data(gpu)) == gpu


def test_a_gpu_can_be_put_in_a_set() -> None:
    assert len(set(all_gpus())) == len(all_gpus())


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA A10G", "a10g"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("RTX_4090", "rtx-4090"),
        ("rtx 4090 24gb", "rtx-4090"),
        ("GeForce GTX 1080 Ti", "gtx-1080-ti"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("h100", "h100-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("ml.g5.xlarge", "a10g"),
        ("ML.P4D.24XLARGE", "a100-40gb"),
        ("g4dn.xlarge", "t4"),
        ("NC24ads_A100_v4", "a100-80gb-pcie"),
        ("colab-t4", "t4"),
    ],
)
def test_names_as_people_and_drivers_write_them_find_their_gpu(name: str, found: str) -> None:
    assert find_gpu(name).name == found


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a100", "a100-40gb"),
        ("v100", "v100-16gb"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx-4060-ti"),
        ("NVIDIA GeForce RTX 3050", "rtx-3050-6gb"),
        ("rtx-3050", "rtx-3050-6gb"),
        ("NVIDIA GeForce RTX 5060 Ti", "rtx-5060-ti"),
    ],
)
def test_a_name_sold_with_two_memories_is_the_smaller_one(name: str, found: str) -> None:
    assert find_gpu(name).name == found


def test_two_gpus_of_one_name_are_told_apart_by_their_memory() -> None:
    name = "NVIDIA GeForce RTX 4060 Ti"
    assert match_gpu(name, 8188 * MIB) is find_gpu("rtx-4060-ti")
    assert match_gpu(name, 16380 * MIB) is find_gpu("rtx-4060-ti-16gb")


@pytest.mark.parametrize(
    ("name", "total_bytes"),
    [
        ("NVIDIA GeForce RTX 3080", 12288 * MIB),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864 * MIB),
        ("AMD Radeon RX 7900 XTX", 24 * GIB),
    ],
)
def test_a_gpu_that_is_not_in_the_catalogue_matches_none(name: str, total_bytes: int) -> None:
    assert match_gpu(name, total_bytes) is None


def test_an_unknown_gpu_is_one_line_that_names_the_nearest_and_where_all_are() -> None:
    with pytest.raises(UnknownGPU) as caught:
        find_gpu("rtx-4095")
    message = str(caught.value)
    assert message.startswith("no GPU 'rtx-4095'; the nearest are ")
    assert len(caught.value.nearest) == 3
    assert "rtx-4090" in caught.value.nearest
    assert all(name in message for name in caught.value.nearest)
    assert caught.value.hint == f"vramfit gpus lists all {len(all_gpus())}"


def test_the_nearest_names_are_of_three_different_gpus() -> None:
    with pytest.raises(UnknownGPU) as caught:
        find_gpu("h1000")
    assert caught.value.nearest[0] == "h100"
    assert len({find_gpu(name) for name in caught.value.nearest}) == 3


@pytest.mark.parametrize("name", ["", "nvidia", "a100\nand more", "x" * 500, "A\N{COMBINING ACUTE ACCENT}100"])
def test_a_name_that_is_no_name_is_still_one_short_line(name: str) -> None:
    with pytest.raises(UnknownGPU) as caught:
        find_gpu(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_an_unknown_instance_is_answered_with_the_nearest_instances() -> None:
    with pytest.raises(UnknownGPU) as caught:
        find_gpu("ml.g5.3xlarge")
    assert all(name.startswith("ml.g5.") for name in caught.value.nearest)
    with pytest.raises(UnknownGPU, match=r"no instance 'ml\.g5\.3xlarge'"):
        find_instance("ml.g5.3xlarge")


@each_instance
def test_every_instance_holds_gpus_of_the_catalogue(instance: Instance) -> None:
    assert find_gpu(instance.gpu).name == instance.gpu
    assert find_gpu(instance.name).name == instance.gpu
    assert 1 <= instance.num_gpus <= 16
    assert instance.host_memory_bytes is None or instance.host_memory_bytes > 8 * GIB
    assert instance.source


def test_no_two_instances_share_a_name_and_none_is_a_gpus_name() -> None:
    names = [instance.name for instance in all_instances()]
    assert len(names) == len(set(names))
    assert not set(names) & {name for gpu in all_gpus() for name in (gpu.name, *gpu.aliases)}


@pytest.mark.parametrize("family", ["p2", "p3", "p3dn", "g4dn", "g5", "g6", "g6e", "p4d", "p4de", "p5", "p5e", "p5en"])
def test_sagemakers_gpu_families_are_all_there(family: str) -> None:
    assert any(instance.name.startswith(f"ml.{family}.") for instance in all_instances())


def test_an_instance_is_found_with_or_without_its_providers_prefix() -> None:
    assert find_instance("ml.g5.12xlarge").num_gpus == 4
    assert find_instance("g5.12xlarge") is find_instance("ML.G5.12xlarge")
    assert find_instance("NC4as_T4_v3").name == "Standard_NC4as_T4_v3"


@pytest.mark.parametrize(
    ("name", "sm", "threads"),
    [
        ("k80", "sm_37", 2048),
        ("t4", "sm_75", 1024),
        ("a100", "sm_80", 2048),
        ("a10g", "sm_86", 1536),
        ("l4", "sm_89", 1536),
        ("h200", "sm_90", 2048),
        ("b200", "sm_100", 2048),
        ("rtx-5090", "sm_120", 1536),
    ],
)
def test_architectures_read_as_compilers_write_them(name: str, sm: str, threads: int) -> None:
    gpu = find_gpu(name)
    assert gpu.sm == sm
    assert gpu.max_threads_per_multiprocessor == threads


def test_bf16_starts_with_ampere() -> None:
    assert not find_gpu("t4").supports_bf16
    assert find_gpu("a100").supports_bf16
    assert find_gpu("a100").compute_capability == DEFAULT_ARCHITECTURE


def test_the_k80_has_the_11_17_gib_that_its_users_see() -> None:
    assert round(find_gpu("k80").total_memory_bytes / GIB, 2) == 11.17
    assert find_gpu("k80").num_multiprocessors == 13


def test_reading_the_catalogue_does_not_import_torch() -> None:
    code = (
        "import sys; from vramfit.devices.catalogue import find_gpu; from vramfit.devices.probe import probe;"
        "find_gpu('t4'); probe();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
