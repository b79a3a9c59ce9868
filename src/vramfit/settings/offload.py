"""`offload`: what waits in host memory."""

from collections.abc import Iterator
from typing import ClassVar

from vramfit.errors import VramfitError
from vramfit.settings.setting import Module, Setting, Technique, Workload, given
from vramfit.settings.values import Choice

HOST_STEPS = ("optimizer", "weights")
"""What is offloaded where the optimizer steps in host memory."""


def offloads_layers(w: Workload) -> bool:
    """Whether the weights of layers wait in host memory."""
    return w.offload == "weights"


def offloads_inputs(w: Workload) -> bool:
    """Whether the inputs of checkpointed layers wait in host memory."""
    return w.offload == "activations"


def steps_on_host(w: Workload) -> bool:
    """Whether the optimizer and its state are in host memory."""
    return w.trains and w.offload in HOST_STEPS


class Offload(Setting):
    keyword, order, applied = "offload", 200, 100
    value = Choice(names=("optimizer", "activations", "weights"), optional=True)
    label = "Kept in host memory"
    labels = (
        ("", "nothing"),
        ("optimizer", "optimizer state and its step"),
        ("activations", "inputs of checkpointed layers"),
        ("weights", "layers, and the optimizer"),
    )
    about = "Waits in the computer’s RAM until the GPU needs it (offload): less memory, slower steps."
    help = "What is kept in host memory until the GPU needs it."
    is_planned = in_inference = at_load = of_weights = True
    must_match_on_resume = False
    implies: ClassVar = {"weights": {"checkpointing": "full"}}  # its layers come again for backward
    asked = (
        given("offload", "offloads", "Whether anything waits in host memory."),
        offloads_layers,
        offloads_inputs,
        steps_on_host,
    )
    is_measured = False
    not_fitted = "and a Trainer's optimizer steps what is on the device"
    techniques = (
        Technique(
            values=("weights", "optimizer", "activations"),
            kind="free",
            does="what is not needed at the moment waits in host memory",
            costs="none: time, where copies do not hide behind computing",
        ),
    )

    def contradictions(self, w: Workload) -> Iterator[str]:
        if w.offload == "optimizer" and not w.trains:
            yield f"offload optimizer is for mode train, not {w.mode}"
        if w.offloads_layers and w.mode == "forward":
            yield "offload weights is for mode train or infer, not forward"
        if w.offloads_inputs and (w.mode == "infer" or not w.is_checkpointed or not w.dropout):
            yield (
                "offload activations is for the inputs of checkpointed layers: take mode train, checkpointing and "
                "dropout"
            )
        if w.is_joint and w.offload != "optimizer":
            yield f"offload {w.offload} and task {w.task} do not go together yet: passes run twice"
        if w.num_gpus > 1:
            yield f"offload {w.offload} is for one GPU: take parallel fsdp"
        if w.steps_on_host:
            yield from self._host_step(w)

    def _host_step(self, w: Workload) -> Iterator[str]:
        if w.loop != "stepper":
            yield f"offload {w.offload} is for loop 'stepper': a plain loop would keep all gradients on the GPU"
        if w.has_8_bit_state:
            yield (
                f"offload {w.offload} and optimizer adamw-8bit do not go together: rounded moments save memory of a "
                "GPU only (take adamw-fused)"
            )
        if not w.offloads_layers:
            return
        if not w.is_fully_checkpointed:
            yield "offload weights computes every layer again in backward: take checkpointing full"
        if not w.dropout:
            yield (
                "offload weights needs dropout: without it layers run as under model.eval(), which checkpoints none "
                "(set the model's dropout probabilities to 0 instead)"
            )
        if w.has_adapters:
            yield "offload weights and lora do not go together: take offload optimizer"
        if w.is_quantized:
            yield f"offload weights and quantize {w.quantize} do not go together"

    def kept(self, w: Workload) -> str | bool:
        return w.offload or False

    def trainer_arguments(self, w: Workload) -> dict[str, str]:
        if w.offloads:
            raise VramfitError(
                f"the Trainer has nothing like offload {w.offload}",
                hint="run the plan with vramfit train or Stepper, or plan with offload=False (--no-offload)",
            )
        return {}

    def inferred(self, value: str | None, *, packs: bool) -> str | None:
        return value if value == "weights" else None

    def is_applied_for(self, w: Workload) -> bool:
        return bool(w.offloads_inputs)

    def apply(self, model: Module, w: Workload) -> None:
        from vramfit.techniques.offloading import layer_inputs

        layer_inputs.apply(model)

    def undo(self, model: Module) -> None:
        from vramfit.techniques.offloading import layer_inputs

        layer_inputs.undo(model)
