"""From `config.json` to a transformers configuration: read with suspicion, every fault named by its field.

And what a configuration's family has and needs: heads and attention kernels, asked of transformers, but for packed
rows, which were compared; and what its decoders need before batches.
"""

import inspect
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramfit.errors import CheckpointError, WorkloadError, nearest_names
from vramfit.quiet import import_modelling
from vramfit.tasks import all_tasks, find_task

if TYPE_CHECKING:
    from torch import nn

MAX_FILE_BYTES = 10 * 10**6
"""A configuration is a few kilobytes; a larger file is something else."""

SIZE_LIMITS: Mapping[str, tuple[int, int]] = {
    "hidden_size": (1, 2**16),
    "embedding_size": (1, 2**16),
    "intermediate_size": (1, 2**20),
    "hidden_dim": (1, 2**20),
    "num_hidden_layers": (1, 1000),
    "num_attention_heads": (1, 2**12),
    "num_key_value_heads": (1, 2**12),
    "num_hidden_groups": (1, 1000),
    "inner_group_num": (1, 1000),
    "head_dim": (1, 2**16),
    "vocab_size": (1, 2**24),
    "max_position_embeddings": (1, 2**24),
    "type_vocab_size": (0, 2**16),
    "num_labels": (1, 10**6),
}
"""Smallest and largest sensible value by standard field name; transformers itself checks types only."""

_OTHER_SIZES = re.compile(r"(num|n)_\w+|\w+_(size|dim|layers|heads|groups|labels)|dim")
_OTHER_LIMIT = 2**24

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


def read_config_file(path: Path) -> dict[str, Any]:
    """The JSON object in a `config.json`, not yet judged.

    Raises:
        CheckpointError: no such file, not readable, too large, not JSON, or not a JSON object.
    """
    where = str(path)
    try:
        if not path.is_file():
            raise CheckpointError(f"{where} is not a file", file=where, hint="name a folder with config.json")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise CheckpointError(
                f"{where} is {size:,} bytes, too large for a model configuration (limit {MAX_FILE_BYTES:,})",
                file=where,
                hint="name the folder that holds the model's config.json",
            )
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}", file=where) from None
    return parse_config(content, where=where)


def parse_config(content: bytes, *, where: str) -> dict[str, Any]:
    """The JSON object in the bytes of a configuration; `where` names it in errors."""
    hint = "save the configuration again with `model.config.save_pretrained(folder)`"
    try:
        data = json.loads(content.decode("utf-8-sig"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else _one_line(error)
        raise CheckpointError(f"{where} is not JSON: {reason}", file=where, hint=hint) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{where} holds a JSON {_kind(data)}, not an object with settings", file=where, hint=hint)
    return data


def make_config(data: Mapping[str, Any], *, where: str) -> Any:
    """A transformers configuration from plain data; never runs code that comes with a model.

    Raises:
        CheckpointError: unknown `model_type`, or a field with an impossible value; one line that names it.
    """
    config_class = _config_class(data, where)
    check_sizes(data, config_class.attribute_map, where=where)
    for key in data:
        if key.startswith("__") or callable(getattr(config_class, key, None)):
            raise CheckpointError(f"{where}: {key!r} is not a configuration field", file=where)
    try:
        return config_class.from_dict({k: v for k, v in data.items() if k != "model_type"})
    except Exception as error:  # transformers raises whatever its field code happens to raise
        raise CheckpointError(
            f"{where}: {config_class.__name__} rejects it: {_one_line(error)}",
            file=where,
            hint="compare the field with the configuration the model was published with",
        ) from None


def check_sizes(data: Mapping[str, Any], attribute_map: Mapping[str, str], *, where: str, inside: str = "") -> None:
    """Refuse sizes that no model has: they would exhaust memory or fail far from their cause.

    Args:
        data: settings by name.
        attribute_map: standard name → the family's own name (DistilBERT's `hidden_size` is `dim`).
        where: the file, for an error.
        inside: path of the part of the file that `data` is, such as `text_config.`.
    """
    standard = {own: name for name, own in attribute_map.items()}
    for key, value in data.items():
        limits = SIZE_LIMITS.get(standard.get(key, key))
        if isinstance(value, dict) and key.endswith("_config"):
            check_sizes(value, {}, where=where, inside=f"{inside}{key}.")
        elif limits is not None and value is not None:
            if type(value) is not int or not limits[0] <= value <= limits[1]:
                raise _bad_field(where, inside + key, value, f"a whole number from {limits[0]} to {limits[1]:,}")
        elif isinstance(value, int | float) and abs(value) > _OTHER_LIMIT and _OTHER_SIZES.fullmatch(key):
            raise _bad_field(where, inside + key, value, f"at most {_OTHER_LIMIT:,}")


def _config_class(data: Mapping[str, Any], where: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = data.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        found = "has no model_type" if model_type is None else f"has model_type {_shown(model_type)}"
        raise CheckpointError(f"{where} {found}", file=where, hint='add "model_type", such as "bert" or "roberta"')
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    if data.get("auto_map"):
        hint = (
            "the model brings its own code: read it, then allow it with trust_remote_code=True or --trust-remote-code"
        )
    else:
        near = ", ".join(nearest_names(model_type[:60], list(CONFIG_MAPPING.keys())))
        hint = f"nearest known types: {near}; a newer transformers may know it"
    raise CheckpointError(
        f"{where}: model_type {_shown(model_type)} is not one that the installed transformers knows",
        file=where,
        hint=hint,
    )


def _bad_field(where: str, key: str, value: object, must_be: str) -> CheckpointError:
    return CheckpointError(f"{where}: {key} is {_shown(value)}; it must be {must_be}", file=where)


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def _kind(data: object) -> str:
    names = {list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(data), "null")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


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


def is_causal(model: "nn.Module") -> bool:
    """Whether a token of the model sees only those before it; of an encoder-decoder, in one of its stacks."""
    return any(getattr(module, "is_causal", False) is True for module in model.modules())


def pools_last_token(model_class: type) -> bool:
    """Whether a classification head reads the rightmost token that is not padding, as the heads of decoders do.

    All of them look for it under one name, in transformers' generic head and in those that are older.
    """
    own = (vars(kind).get("forward") for kind in model_class.__mro__)  # some hand on to the generic head
    codes = (getattr(inspect.unwrap(forward), "__code__", None) for forward in own if callable(forward))
    return any("last_non_pad_token" in getattr(code, "co_varnames", ()) for code in codes)


def padding_id(config: Any) -> int:
    """The token that fills up shorter texts: the configuration's, else the one that ends a text, else the first.

    A token beyond the vocabulary, as some configurations name, is none: a GPU would end the process at it.

    >>> from types import SimpleNamespace
    >>> padding_id(SimpleNamespace(pad_token_id=None, eos_token_id=[7, 8], vocab_size=10))
    7
    >>> padding_id(SimpleNamespace(pad_token_id=None, eos_token_id=128001, vocab_size=32000))
    0
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    named, end = (getattr(text, name, None) for name in ("pad_token_id", "eos_token_id"))
    end = end[0] if isinstance(end, list | tuple) and end else end
    size = getattr(text, "vocab_size", math.inf)
    return next((token for token in (named, end) if isinstance(token, int) and 0 <= token < size), 0)


def in_full_precision(config: Any) -> None:
    """Have a configuration name no type for weights, and its parts neither.

    transformers builds the backbone of a generic head in the type that the configuration names, and the head in fp32;
    which type weights have is for the precision of a workload to say.
    """
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if getattr(part, "dtype", None) is not None:
            part.dtype = None


def make_ready(model: Any) -> None:
    """Let a decoder take batches: its configuration names a padding token, and it keeps no keys and values.

    A head that reads the last token must know which one is padding, and refuses batches otherwise. A cache would hold
    the keys and values of every layer beside those that attention keeps; nothing is generated here. Models that are
    not decoders are left alone.

    A configuration may ask a decoder to see whole texts (`is_causal` false). transformers follows it in the masks that
    it makes, and attends causally where no token is padding and no mask is made; here attention follows it too.
    """
    reads_last = pools_last_token(type(model))
    if not reads_last and not is_causal(model):
        return
    text = model.config.get_text_config()
    if reads_last and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = padding_id(text)
    sees_all = getattr(text, "is_causal", True) is False
    for module in model.modules():  # stacks of encoder-decoders have configurations of their own
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False
        if sees_all and getattr(module, "is_causal", None) is True:
            module.is_causal = False


def pad_as_configured(tokenizer: Any, config: Any) -> None:
    """Have a tokenizer fill up with the token that the model takes for padding.

    Some decoders come with no padding token, or with one that their configuration does not name: their heads would read
    padding as text.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    is_named = getattr(text, "pad_token_id", 0) is not None
    if tokenizer.pad_token_id is not None and is_named:
        return
    token = tokenizer.convert_ids_to_tokens(padding_id(text))
    if isinstance(token, str):
        tokenizer.pad_token = token
