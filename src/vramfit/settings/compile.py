"""`compile`: `torch.compile` on the model's layers."""

from collections.abc import Iterator

from vramfit.settings.setting import TRITON_CAPABILITY, Setting, Technique, Workload, given
from vramfit.settings.values import Switch


class Compile(Setting):
    keyword, order = "compile", 210
    value = Switch()
    default = False
    label = "torch.compile"
    about = "Layers become kernels made for them: faster steps after minutes of compiling."
    help = "torch.compile on the model's layers; a plan uses it in runs that are long enough to repay the compile time."
    is_planned = in_inference = True
    not_exact = "fused kernels round otherwise"
    few_measured = "compiled layers were compared with few measurements"
    is_measured = False
    asked = (given("compile", "is_compiled", "Whether the model's layers are compiled by `torch.compile`."),)
    techniques = (
        Technique(
            values=("True",),
            kind="numeric",
            does="fused kernels keep fewer intermediate results, and read and write less",
            costs="hardly any: fused kernels round less often",
        ),
    )

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.offloads_layers:
            yield "offload weights and compile do not go together: layers come and go"
        elif w.offloads:
            yield f"compile and offload {w.offload} do not go together: what hooks do is not compiled"
        if w.is_quantized:
            yield f"compile and quantize {w.quantize} do not go together yet"
        if w.num_gpus > 1:
            yield "compile is for one GPU yet"
        if w.is_joint:
            yield f"compile and task {w.task} do not go together yet: passes run with and without a graph"

    def gpu_problems(self, w: Workload, capability: tuple[int, int], gpu: str) -> Iterator[str]:
        if capability < TRITON_CAPABILITY:
            yield f"compile: Triton does not compile for {gpu}"
