"""What settings give to `Workload`, for type checkers; made by `python scripts/make_fields.py`."""

from dataclasses import Field
from typing import Any, ClassVar

import torch

class Fields:
    """A field for each setting, and what is asked of them."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    model: str
    task: str
    mode: str
    batch: int
    accumulate: int
    micro_batch: int
    seq: int
    lengths: tuple[int, ...] | None
    texts: int | None
    text_tokens: int | None
    num_labels: int | None
    problem: str | None
    pooling: str | None
    loss: str | None
    temperature: float | None
    loss_margin: float | None
    mask_above: float | None
    matryoshka: tuple[int, ...] | None
    precision: str
    distill: str | None
    distill_temperature: float | None
    distill_alpha: float | None
    distill_width: int | None
    held_teacher: str | None
    distill_relation_heads: int | None
    distill_relation_layer: int | None
    attention: str | None
    mask: str
    dropout: bool
    checkpointing: str | int | None
    freeze: str | int | tuple[str, ...] | None
    optimizer: str
    max_grad_norm: float | None
    lora: int | None
    lora_targets: tuple[str, ...] | None
    quantize: str | None
    offload: str | None
    compile: bool
    fused: bool
    graphs: bool
    casts: str
    allocator: str
    num_gpus: int
    parallel: str | None
    num_nodes: int
    loop: str
    gpu: str | None
    memory: int | None
    host_memory: int | None
    torch_version: str | None

    def __init__(
        self,
        *,
        model: str,
        task: str = ...,
        mode: str = ...,
        batch: int = ...,
        accumulate: int | None = ...,
        micro_batch: int | None = ...,
        seq: int = ...,
        lengths: tuple[int, ...] | None = ...,
        texts: int | None = ...,
        text_tokens: int | None = ...,
        num_labels: int | None = ...,
        problem: str | None = ...,
        pooling: str | None = ...,
        loss: str | None = ...,
        temperature: float | None = ...,
        loss_margin: float | None = ...,
        mask_above: float | None = ...,
        matryoshka: tuple[int, ...] | None = ...,
        precision: str = ...,
        distill: str | None = ...,
        distill_temperature: float | None = ...,
        distill_alpha: float | None = ...,
        distill_width: int | None = ...,
        held_teacher: str | None = ...,
        distill_relation_heads: int | None = ...,
        distill_relation_layer: int | None = ...,
        attention: str | None = ...,
        mask: str = ...,
        dropout: bool = ...,
        checkpointing: str | int | None = ...,
        freeze: str | int | tuple[str, ...] | None = ...,
        optimizer: str = ...,
        max_grad_norm: float | None = ...,
        lora: int | None = ...,
        lora_targets: tuple[str, ...] | None = ...,
        quantize: str | None = ...,
        offload: str | None = ...,
        compile: bool = ...,
        fused: bool = ...,
        graphs: bool = ...,
        casts: str = ...,
        allocator: str = ...,
        num_gpus: int = ...,
        parallel: str | None = ...,
        num_nodes: int = ...,
        loop: str = ...,
        gpu: str | None = ...,
        memory: int | str | None = ...,
        host_memory: int | str | None = ...,
        torch_version: str | None = ...,
    ) -> None: ...
    @property
    def num_passes(self) -> int:
        """Passes of a step: micro-batches whose gradients are summed."""

    @property
    def texts_per_sample(self) -> int:
        """Texts of a sample that is learned from, each of which passes by itself; elsewhere a text is a sample."""

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample whose texts all have full length."""

    @property
    def row_texts(self) -> int:
        """Texts that a packed row has at most for each of its samples, where texts are compared."""

    @property
    def is_joint(self) -> bool:
        """Whether the loss of a step looks at all of its samples at once: no pass has a loss of its own."""

    @property
    def runs_twice(self) -> bool:
        """Whether the passes of a step run twice: first for the vectors that its loss compares, then to learn."""

    @property
    def step_texts(self) -> int:
        """Texts of a whole step, those of all GPUs."""

    @property
    def compared_by(self) -> tuple[object, ...]:
        """All that says how texts are compared: workloads that are equal in it compare alike."""

    @property
    def leaves_labels_out(self) -> bool:
        """Whether the loss leaves out labels that are ignored, so that a batch can be filled up with them."""

    @property
    def autocasts(self) -> bool:
        """Whether autocast casts the inputs of products to 16 bits."""

    @property
    def is_32_bit(self) -> bool:
        """Whether products have inputs of 32 bits."""

    @property
    def has_tf32(self) -> bool:
        """Whether products round their inputs to TF32."""

    @property
    def has_bf16_weights(self) -> bool:
        """Whether weights, gradients and optimizer state are in bfloat16."""

    @property
    def has_fp32_weights(self) -> bool:
        """Whether weights are in fp32, whatever products are computed in."""

    @property
    def arithmetic(self) -> str:
        """The precision but for what GPUs differ in: TF32 or not, bfloat16 or float16 under autocast, take as much."""

    @property
    def mixed_precision(self) -> str:
        """The type that autocast casts to, as transformers and accelerate call it: bf16, fp16 or no."""

    @property
    def weight_dtype(self) -> torch.dtype:
        """The type of the weights."""

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The type that autocast casts to; None where it does not run."""

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, by a `GradScaler`: the range of fp16 is small."""

    @property
    def is_taught(self) -> bool:
        """Whether a student learns from the answers of a teacher."""

    @property
    def reads_hidden(self) -> bool:
        """Whether it learns from the outputs of the teacher's layers too."""

    @property
    def reads_relations(self) -> bool:
        """Whether it learns from how the teacher's tokens are related too."""

    @property
    def reads_layers(self) -> bool:
        """Whether it learns from what is inside the teacher."""

    @property
    def holds_teacher(self) -> bool:
        """Whether a teacher is in memory beside its student."""

    @property
    def teacher_written_ns(self) -> int | None:
        """When the configuration of a held teacher was written; None for one that is no folder."""

    @property
    def is_packed(self) -> bool:
        """Whether sequences lie end to end in one row, without padding."""

    @property
    def has_own_attention(self) -> bool:
        """Whether no kernel was asked for, so that the model takes its own."""

    @property
    def is_sdpa(self) -> bool:
        """Whether torch chooses the kernel."""

    @property
    def is_checkpointed(self) -> bool:
        """Whether layers are computed again in backward."""

    @property
    def is_fully_checkpointed(self) -> bool:
        """Whether all layers are computed again in backward."""

    @property
    def num_checkpointed(self) -> int | None:
        """How many of the lowest layers are computed again in backward; None where it is all of them or none."""

    @property
    def freezes_layers(self) -> bool:
        """Whether no layer learns."""

    @property
    def is_frozen(self) -> bool:
        """Whether parameters do not learn that could."""

    @property
    def has_same_layers(self) -> bool:
        """Whether all layers do the same: each learns, and all or none are computed again."""

    @property
    def steps_in_place(self) -> bool:
        """Whether the optimizer's step needs no temporaries (`step.commit.needs_temporaries` asks an optimizer)."""

    @property
    def has_8_bit_state(self) -> bool:
        """Whether the optimizer keeps its state in 8 bits."""

    @property
    def is_adamw(self) -> bool:
        """Whether it is torch's AdamW."""

    @property
    def name_in_trainer(self) -> str:
        """What transformers' `TrainingArguments.optim` calls it."""

    @property
    def state_copies(self) -> int:
        """Moments of the size and type of what learns; other optimizers than AdamW may keep next to nothing."""

    @property
    def state_bytes(self) -> int:
        """Bytes of moments for each weight that learns, beside `state_copies`, at the least."""

    @property
    def has_adapters(self) -> bool:
        """Whether LoRA adapters learn in place of the weights beside them."""

    @property
    def learns_in_layers(self) -> bool:
        """Whether layers keep anything for backward."""

    @property
    def is_quantized(self) -> bool:
        """Whether linear weights that do not learn are in fewer bits."""

    @property
    def weights_in_words(self) -> str:
        """The type of the weights for people, such as "fp32 with int8 linear layers"."""

    @property
    def offloads(self) -> bool:
        """Whether anything waits in host memory."""

    @property
    def offloads_layers(self) -> bool:
        """Whether the weights of layers wait in host memory."""

    @property
    def offloads_inputs(self) -> bool:
        """Whether the inputs of checkpointed layers wait in host memory."""

    @property
    def steps_on_host(self) -> bool:
        """Whether the optimizer and its state are in host memory."""

    @property
    def is_compiled(self) -> bool:
        """Whether the model's layers are compiled by `torch.compile`."""

    @property
    def is_fused(self) -> bool:
        """Whether a layer is one function, with kernels of vramfit's own."""

    @property
    def captures_graphs(self) -> bool:
        """Whether packed passes are captured as CUDA graphs and replayed."""

    @property
    def keeps_casts(self) -> bool:
        """Whether autocast keeps its casts of weights for a pass."""

    @property
    def casts_by_layer(self) -> bool:
        """Whether a layer's weights are cast by one call, where anything is cast."""

    @property
    def has_expandable_segments(self) -> bool:
        """Whether segments of PyTorch's allocator grow in place."""

    @property
    def shards(self) -> bool:
        """Whether several GPUs have a part of the model each."""
