"""Where a job runs: the GPU and its memory, the host's memory, the torch release, the allocator; how many GPUs share a
step (`num_gpus`, `parallel`, `num_nodes`), and the loop that runs it."""

from collections.abc import Iterator, Mapping
from typing import Any

from vramfit.settings.setting import Setting, Technique, Workload
from vramfit.settings.values import Bytes, Choice, Count, Text


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
    help = "GPU from the catalogue (vramfit gpus): sets the architecture and, without --memory, the capacity."
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


def has_expandable_segments(w: Workload) -> bool:
    """Whether segments of PyTorch's allocator grow in place."""
    return w.allocator == "expandable"


def shards(w: Workload) -> bool:
    """Whether several GPUs have a part of the model each."""
    return w.num_gpus > 1 and w.parallel == "fsdp"


class Allocator(Setting):
    keyword, order, group = "allocator", 250, "machine"
    value = Choice(names=("default", "expandable"))
    default = "default"
    planned_default = "expandable"
    in_run = False
    label = "Expandable segments"
    about = "A setting of PyTorch’s allocator (PYTORCH_ALLOC_CONF): less is lost between blocks."
    help = "Segments of PyTorch's allocator; `expandable` means expandable_segments:True."
    is_observed = True
    is_planned = in_inference = True
    in_trace = ""
    asked = (has_expandable_segments,)
    techniques = (
        Technique(
            values=("expandable",),
            kind="free",
            does="segments grow in place, so that less is lost between blocks",
            costs="none",
            why="batches of varied lengths leave holes in fixed segments: segments that grow lose about 3 %",
        ),
    )

    def words(self, w: Workload) -> str | None:
        return None if w.allocator == "default" else f"{w.allocator} segments"


class NumGpus(Setting):
    keyword, order, group = "num_gpus", 260, "machine"
    value = Count()
    default = 1
    help = "Number of GPUs; each processes its share of the batch, in micro-batches of its own."
    is_measured = on_page = False

    def contradictions(self, w: Workload) -> Iterator[str]:
        if not w.trains:
            yield f"num_gpus {w.num_gpus} is for mode train: for {w.mode}, start a process a GPU"
        elif w.loop != "stepper":
            yield f"num_gpus {w.num_gpus} is for loop 'stepper': a plain loop's mean is not that of the whole batch"
        if w.num_gpus > w.batch:
            yield f"num_gpus {w.num_gpus} is more than the {w.batch} samples of a batch"

    def words(self, w: Workload) -> str | None:
        return f"one of {w.num_gpus:,} GPUs ({w.parallel or 'ddp'})" if w.num_gpus > 1 else None


class Parallel(Setting):
    keyword, order, group = "parallel", 270, "machine"
    value = Choice(names=("ddp", "fsdp"), optional=True)
    in_run = True
    asked = (shards,)
    help = "How several GPUs share the model: `ddp` keeps a copy on each, `fsdp` a shard on each."
    is_measured = on_page = False
    must_match_on_resume = False

    is_said = False

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.shards and w.optimizer in ("adamw-8bit", "adafactor"):
            yield f"optimizer {w.optimizer} steps whole matrices, which fsdp has cut: take adamw-fused"


class NumNodes(Setting):
    keyword, order, group = "num_nodes", 280, "machine"
    value = Count()
    default = 1
    help = "Number of machines among which the GPUs are divided equally."
    is_measured = on_page = False
    in_trace = ""

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.num_gpus % w.num_nodes != 0:
            machines = f"{w.num_nodes} machines: not as many in each (num_gpus counts all of them)"
            yield f"num_gpus {w.num_gpus} are in {machines}"

    is_said = False


class Loop(Setting):
    keyword, order = "loop", 290
    value = Choice(names=("plain", "stepper"))
    default = "plain"
    hidden = True
    label, modes = "vramfit’s Stepper", ("train",)
    about = "Instead of a plain PyTorch loop: steps that ran out of memory are done again in smaller passes."
    help = "Training loop to predict: a plain PyTorch loop, or vramfit's Stepper."

    def derived(self, given: Mapping[str, Any]) -> dict[str, str]:
        """Keywords of the loop where none is given and only the Stepper runs the other settings."""
        is_needed = given.get("attention") == "packed" or given.get("offload") in ("optimizer", "weights")
        is_needed = is_needed or (given.get("num_gpus") or 1) > 1 or given.get("held_teacher") is not None
        is_needed = is_needed and given.get("mode", "train") == "train"
        return {self.keyword: "stepper"} if is_needed and self.keyword not in given else {}

    def words(self, w: "Workload") -> str | None:
        return None if w.loop == "plain" else f"{w.loop} loop"
