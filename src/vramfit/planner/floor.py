"""The least that a job holds when its optimizer steps, by the shapes of its weights: nothing is traced."""

from dataclasses import dataclass

from vramfit.estimator.traced import TracedWorkload
from vramfit.models.anatomy import embeddings, encoder_layers
from vramfit.models.build import build_meta
from vramfit.models.catalogue import all_entries
from vramfit.models.resolve import ResolvedModel
from vramfit.techniques.application import apply
from vramfit.techniques.quantization import inner_tensors

STATE_COPIES = {"adamw": 2, "adamw-fused": 2, "adamw-single": 2}
"""Optimizer → moments of the size and type of what learns; others may keep next to nothing."""
STATE_BYTES = {"adamw-8bit": 2}
"""Optimizer → bytes of its moments for each weight, at the least."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The weights of a model, and those of them that are sure to learn."""

    weight_bytes: int
    learned_bytes: int
    num_learned: int

    @staticmethod
    def of(traced: TracedWorkload) -> "Shapes":
        """The shapes of a job's model with its techniques applied.

        Embeddings and layers are sure to learn where they are not frozen: in families of the catalogue, as
        transformers builds them, a step uses all of them. Of other models that is not known.

        Raises:
            WorkloadError, MissingExtra: as `apply`.
        """
        model = build_meta(traced.resolved, attention=traced.workload.attention)
        apply(model, traced.workload)
        weight_bytes = sum(part.nbytes for p in model.parameters() for _, part in inner_tensors(p))
        parts = (embeddings(model), *encoder_layers(model)) if _is_known(traced.resolved) else ()
        learned = {p for part in parts if part is not None for p in part.parameters() if p.requires_grad}
        return Shapes(weight_bytes, sum(p.nbytes for p in learned), sum(p.numel() for p in learned))

    def floor_bytes(self, optimizer: str) -> int:
        """Weights, gradients and the optimizer's state."""
        gradients_and_state = self.learned_bytes * (1 + STATE_COPIES.get(optimizer, 0))
        return self.weight_bytes + gradients_and_state + self.num_learned * STATE_BYTES.get(optimizer, 0)


def _is_known(resolved: ResolvedModel) -> bool:
    families = {entry.family for entry in all_entries()}
    is_theirs = resolved.model_class.__module__.startswith("transformers.")
    return is_theirs and getattr(resolved.config, "model_type", None) in families
