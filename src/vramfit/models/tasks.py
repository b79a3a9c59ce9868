"""Which heads and attention kernels a family has: asked of transformers, but for packed rows, which were compared."""

from typing import Any

from vramfit.errors import WorkloadError
from vramfit.quiet import import_modelling
from vramfit.tasks import all_tasks, find_task

ENCODER = "AutoModel"
"""The auto class of an encoder alone."""
PACKED_ENCODERS = (
    *("albert", "bert", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "esmc", "gte"),
    *("jina_embeddings_v3", "modernbert", "nomic_bert", "roberta", "roberta-prelayernorm", "roc_bert"),
    *("xlm-roberta", "xlm-roberta-xl"),
)
PACKED_DECODERS = (
    *("arcee", "axk1", "ctrl", "deepseek_v2", "deepseek_v3", "diffllama", "exaone4", "gemma", "gemma3_text", "glm"),
    *("glm4", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "jetmoe"),
    *("llama", "minicpm3", "ministral", "ministral3", "mistral", "mistral4", "mixtral", "modernbert-decoder", "olmo"),
    *("olmo2", "olmo3", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("seed_oss", "smollm3", "starcoder2"),
)
"""Model types whose gradients of packed rows were compared with those of padded ones (`benchmarks/family_steps.py`).
Not those that look along a row besides attention, or make attention's masks or scores in a way of their own, though
they have the attention interface: EuroBERT, ESM, MobileBERT, Doge, Gemma 2, gpt-oss, MiniMax, Nemotron."""
PACKED_FAMILIES = (*PACKED_ENCODERS, *PACKED_DECODERS)


def supported_tasks(config: Any) -> tuple[str, ...]:
    """The tasks that transformers has a head for, for this configuration's family."""
    return tuple(task.name for task in all_tasks() if _find_class(config, task.auto_class) is not None)


def class_for_task(config: Any, task: str) -> type:
    """The transformers class of a task for this configuration's family.

    Raises:
        WorkloadError: no such task, or the family has no head for it; says which it has.
    """
    found = _find_class(config, find_task(task).auto_class)
    if found is None:
        family = getattr(config, "model_type", "") or type(config).__name__
        supported = supported_tasks(config)
        raise WorkloadError(
            [f"{family} models have no head for task {task!r}; they have {', '.join(supported) or 'none'}"],
            hint=f"take task {supported[0]!r}" if supported else None,
        )
    return found


def task_of_class(model_class: type, config: Any, *, preferred: str) -> str:
    """The task a model class is for; `preferred` where several are, or none, share that class."""
    matching = [task.name for task in all_tasks() if _find_class(config, task.auto_class) is model_class]
    return matching[0] if matching and preferred not in matching else preferred


def supported_attention(model: Any) -> tuple[str, ...]:
    """The attention kernels of a model, best first.

    `packed` stands for a kernel of our own: it needs the attention interface of transformers, and a family whose other
    code does not look along a row.

    Args:
        model: a configuration, a model class or a model.
    """
    flags = _flags_of(model)
    offered = {
        "sdpa": ("_supports_sdpa",),
        "packed": ("_supports_attention_backend",),
        # Older remote code still carries the name with a version.
        "flash_attention_2": ("_supports_flash_attn", "_supports_flash_attn_2"),
        "flex_attention": ("_supports_flex_attn",),
    }
    kernels = [name for name, names in offered.items() if any(getattr(flags, n, False) for n in names)]
    if getattr(getattr(flags, "config_class", None), "model_type", None) not in PACKED_FAMILIES:
        kernels = [name for name in kernels if name != "packed"]
    kernels.insert(1 if "sdpa" in kernels else 0, "eager")
    return tuple(kernels)


def default_attention(model: Any) -> str:
    """What transformers takes when nothing is asked: sdpa where the model has it, else eager."""
    return "sdpa" if "sdpa" in supported_attention(model) else "eager"


def _flags_of(model: Any) -> Any:
    if isinstance(model, type) or hasattr(model, "forward"):
        return model
    return encoder_class(model)


def encoder_class(config: Any) -> type | None:
    """The class of an encoder without a head."""
    return _find_class(config, ENCODER)


def _find_class(config: Any, auto_class: str) -> type | None:
    """The class an auto class would build for this configuration, without building it."""
    import transformers

    import_modelling()
    mapping = getattr(transformers, auto_class)._model_mapping
    try:
        found: Any = mapping.get(type(config), None)
    except (ImportError, AttributeError):  # the family needs a package that is not installed
        return None
    if isinstance(found, tuple | list):
        named = getattr(config, "architectures", None) or ()
        found = next((c for c in found if c.__name__ in named), found[0])
    return found if isinstance(found, type) else None
