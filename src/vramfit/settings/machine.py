"""Where a job runs: the GPU, its memory, the host's, and the torch that is predicted for."""

from vramfit.settings.setting import Setting
from vramfit.settings.values import Bytes, Text


class _Machine(Setting):
    group = "machine"
    in_inference = True
    in_trace = ""
    must_match_on_resume = is_kept_on_resume = False

    is_said = False


class Gpu(_Machine):
    keyword, order, is_basic = "gpu", 300, True
    value = Text(such="t4")
    in_run = True
    help = "GPU from the catalogue (vramfit gpus): sets the architecture and, without memory, the capacity."
    in_answers = True


class Memory(_Machine):
    keyword, order, is_basic = "memory", 310, True
    value = Bytes()
    in_run = True
    help = "Memory that PyTorch's allocator may reserve, such as 11.17GiB."
    pattern = r"^[0-9]{1,12}(\.[0-9]{1,6})? ?([KMGT]i?B|B)?$"
    at_load = True


class HostMemory(_Machine):
    keyword, order = "host_memory", 320
    value = Bytes()
    in_run = True
    help = "Host memory that offloading may use, such as 16GiB."
    on_page = False


class TorchVersion(_Machine):
    keyword, order = "torch_version", 330
    value = Text(such="2.11", metavar="X.Y")
    help = "PyTorch version to predict for, such as 2.11. Default: the installed version."
    on_page = False
