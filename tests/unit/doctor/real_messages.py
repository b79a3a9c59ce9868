"""Out-of-memory messages that people reported in public, of 2018 to 2026, each with where and what it says."""

from dataclasses import dataclass, field
from typing import Any

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Reported:
    """One message, and what is essential in it."""

    year: int
    where: str
    text: str
    kind: str
    cause: str
    figures: dict[str, Any] = field(default_factory=dict)
    gpu: str | None = None


MESSAGES = (
    Reported(
        2018,
        "MVIG-SJTU/AlphaPose#154",
        "RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58",
        "driver",
        "unknown",
    ),
    Reported(
        2019,
        "shllln/GenerativeGraph#5",
        "RuntimeError: CUDA out of memory. Tried to allocate 1024.00 KiB (GPU 0; 11.17 GiB total capacity; 10.90 GiB "
        "already allocated; 576.00 KiB free; 30.96 MiB cached)",
        "allocator",
        "job",
        {
            "requested_bytes": MIB,
            "total_bytes": int(11.17 * GIB),
            "allocated_bytes": int(10.90 * GIB),
            "free_bytes": 576 * 1024,
            "cached_bytes": int(30.96 * MIB),
            "device": 0,
        },
        "k80",
    ),
    Reported(
        2019,
        "a blog post on BERT's memory",
        "exception <class 'RuntimeError'> : CUDA out of memory. Tried to allocate 6.00 GiB (GPU 0; 11.17 GiB total "
        "capacity; 4.92 GiB already allocated; 4.88 GiB free; 816.27 MiB cached)",
        "allocator",
        "job",
        {"requested_bytes": 6 * GIB, "free_bytes": int(4.88 * GIB)},
        "k80",
    ),
    Reported(
        2019,
        "NeverGiveU/CartoonGAN-pytorch#1",
        "RuntimeError: [enforce fail at CPUAllocator.cpp:64] . DefaultCPUAllocator: can't allocate memory: you tried "
        "to allocate 67108864 bytes. Error code 12 (Cannot allocate memory)",
        "host allocator",
        "host",
        {"requested_bytes": 64 * MIB},
    ),
    Reported(
        2020,
        "2KangHo/vdsr_pytorch#2",
        "RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 15.90 GiB total capacity; 13.13 GiB "
        "already allocated; 415.88 MiB free; 14.80 GiB reserved in total by PyTorch)",
        "allocator",
        "fragmentation",
        {"reserved_bytes": int(14.80 * GIB), "cached_bytes": int(14.80 * GIB) - int(13.13 * GIB)},
        "p100",
    ),
    Reported(
        2020,
        "DeepMotionAIResearch/DenseMatchingBenchmark#20",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\n"
        "Exception raised from createCublasHandle at /opt/conda/conda-bld/pytorch_1595629403081/build/aten/src/ATen/"
        "cuda/CublasHandlePool.cpp:8 (most recent call first):",
        "library",
        "unknown",
    ),
    Reported(
        2021,
        "pytorch/pytorch#59778",
        "CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB already "
        "allocated; 3.03 GiB free; 1.24 GiB reserved in total by PyTorch) ",
        "allocator",
        "free but refused",
        {"total_bytes": 6 * GIB, "free_bytes": int(3.03 * GIB)},
    ),
    Reported(
        2022,
        "RistoranteRist/FastFlow#4",
        "RuntimeError: CUDA out of memory. Tried to allocate 74.00 MiB (GPU 0; 11.91 GiB total capacity; 10.79 GiB "
        "already allocated; 12.94 MiB free; 11.21 GiB reserved in total by PyTorch) If reserved memory is >> "
        "allocated memory try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory "
        "Management and PYTORCH_CUDA_ALLOC_CONF",
        "allocator",
        "job",
        {"requested_bytes": 74 * MIB},
    ),
    Reported(
        2022,
        "taohan10200/IIM#28",
        "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other "
        "API call,so the stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1.",
        "driver",
        "unknown",
    ),
    Reported(
        2022,
        "ymoslem/OpenNMT-Tutorial#6",
        "Memory cgroup out of memory: Killed process 629 (onmt_train) total-vm:14119556kB, anon-rss:6538204kB, "
        "file-rss:80652kB, shmem-rss:16kB, UID:0 pgtables:13432kB oom_score_adj:0",
        "host killed",
        "host",
        {"process_bytes": 6538204 * 1024},
    ),
    Reported(
        2023,
        "mozilla/bugbug#3906",
        "[model:stepstoreproduce] Training task exit with status code 137",
        "host killed",
        "host",
    ),
    Reported(
        2023,
        "lllyasviel/Fooocus#1139",
        "RuntimeError: MPS backend out of memory (MPS allocated: 8.89 GB, other allocations: 172.98 MB, max allowed: "
        "9.07 GB). Tried to allocate 6.25 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable "
        "upper limit for memory allocations (may cause system failure).",
        "mps",
        "job",
        {"requested_bytes": int(6.25 * MIB), "allowed_bytes": int(9.07 * GIB)},
    ),
    Reported(
        2024,
        "kerrj/lerf#73 (the misspelt capacity is PyTorch 2.1's)",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacty of "
        "23.65 GiB of which 1.66 GiB is free. Including non-PyTorch memory, this process has 20.81 GiB memory in use. "
        "Of the allocated memory 12.09 GiB is allocated by PyTorch, and 4.84 GiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting max_split_size_mb to avoid "
        "fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF",
        "allocator",
        "fragmentation",
        {
            "total_bytes": int(23.65 * GIB),
            "process_bytes": int(20.81 * GIB),
            "cached_bytes": int(4.84 * GIB),
            "requested_bytes": 3 * GIB,
        },
    ),
    Reported(
        2024,
        "Kunhao-Liu/StyleGaussian#11",
        "RuntimeError: CUDA out of memory. Tried to allocate 130674.91 GiB (GPU 0; 79.15 GiB total capacity; 27.53 GiB "
        "already allocated; 37.61 GiB free; 28.21 GiB reserved in total by PyTorch) If reserved memory is >> allocated "
        "memory try setting max_split_size_mb to avoid fragmentation.",
        "allocator",
        "one request",
    ),
    Reported(
        2025,
        "FireRedTeam/FireRedTTS2#17",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 26.00 MiB. GPU 0 has a total capacity of 11.66 "
        "GiB of which 9.81 MiB is free. Process 3893521 has 618.00 MiB memory in use. Process 1493972 has 1.28 GiB "
        "memory in use. Including non-PyTorch memory, this process has 9.74 GiB memory in use. Of the allocated memory "
        "9.30 GiB is allocated by PyTorch, and 163.19 MiB is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See documentation for Memory Management",
        "allocator",
        "other process",
        {"others_bytes": 618 * MIB + int(1.28 * GIB)},
    ),
    Reported(
        2025,
        "kaito-project/kaito#976 (in a container, where the process does not know its own number)",
        "ERROR 04-01 [engine.py:160] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 546.00 MiB. "
        "GPU 0 has a total capacity of 15.77 GiB of which 514.19 MiB is free. Process 562167 has 15.25 GiB memory in "
        "use. Of the allocated memory 13.73 GiB is allocated by PyTorch, with 46.00 MiB allocated in private pools "
        "(e.g., CUDA Graphs), and 736.86 MiB is reserved by PyTorch but unallocated.",
        "allocator",
        "job",
        {"process_bytes": int(15.25 * GIB), "other_processes": (), "private_pool_bytes": 46 * MIB},
    ),
    Reported(
        2025,
        "ROCm/TheRock#2118",
        "2025-11-12T11:25:13.4961658Z FAILED [0.0005s] test_autograd.py::test_inplace_on_view_multi_output_safe_cuda - "
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 255.98 "
        "GiB of which 244.65 GiB is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by "
        "PyTorch, with 17.00 MiB allocated in private pools (e.g., HIP Graphs), and 54.99 MiB is reserved by PyTorch "
        "but unallocated.",
        "allocator",
        "limit",
        {"allowed_bytes": int(1.05 * GIB)},
    ),
    Reported(
        2026,
        "Comfy-Org/ComfyUI#12366",
        "CUDA error: out of memorySearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/ for more "
        "information.CUDA kernel errors might be asynchronously reported at some other API call",
        "driver",
        "unknown",
    ),
)
