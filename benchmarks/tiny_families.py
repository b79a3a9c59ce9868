"""Every model type of transformers with a sequence-classification head, as a configuration of a few thousand weights.

`tiny_config` sets the sizes that families share by the names they have for them; `OWN` holds what single families need
besides: sizes that must divide each other, experts, windows, parts of another modality.
"""

import contextlib
import logging
from typing import Any

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers",), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "attention_head_size"), 8),
    **dict.fromkeys(("intermediate_size", "d_ff", "d_inner", "dff", "hidden_dim", "ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_size", "moe_intermediate_size"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 80),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok",), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "vocab_size": 128,
    "shared_expert_intermediate_size": 32,
    "sliding_window": 12,
    "local_attention": 16,
    "word_embed_proj_dim": 32,
    "image_size": 32,
    "patch_size": 16,
    "depth": 1,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "query_pre_attn_scalar": 8,
    "relative_attention_num_buckets": 8,
}
"""Names that families share → a small value; a family that has no such name is left alone."""
LINEAR_ATTENTION = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
OWN: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 4} for name in ("deepseek_v3", "minicpm3", "esmc")},
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **dict.fromkeys(("qwen3_5_text", "qwen3_next"), LINEAR_ATTENTION),
    "axk1": {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
    "axk2": {"num_key_value_heads": 4, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "esm": {"vocab_size": 128, "mask_token_id": 4},
    "funnel": {"block_sizes": [1, 1]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lilt": {"hidden_size": 48},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 32},
    "markuplm": {
        "max_xpath_tag_unit_embeddings": 16,
        "max_xpath_subs_unit_embeddings": 32,
        "tag_pad_id": 10,
        "subs_pad_id": 30,
        "xpath_unit_hidden_size": 8,
        "max_depth": 4,
    },
    "mistral4": {"num_key_value_heads": 4, "head_dim": 16},
    "mpnet": {"relative_attention_num_buckets": 32},
    "nemotron": {"num_key_value_heads": 2},
    "perceiver": {
        "num_latents": 8,
        "d_latents": 32,
        "num_blocks": 1,
        "num_self_attends_per_block": 1,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
    },
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 32,
        "shape_vocab_size": 32,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "t5": {"decoder_start_token_id": 0},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "use_mamba_kernels": False,
        "n_mamba_heads": 4,
        "chunk_size": 8,
        "mamba_d_state": 8,
        "num_key_value_heads": 4,
    },
}
"""Model type → what it needs besides."""
PADDING, END, BEGIN, FIRST_TOKEN = 1, 2, 3, 10
TOKENS = {"pad_token_id": PADDING, "bos_token_id": BEGIN, "eos_token_id": END}
"""Of every tiny model: the tokens that fill up, end and begin a text, and the first that stands for a word."""


def all_types() -> tuple[str, ...]:
    """Model types that have a sequence-classification head."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES

    return tuple(NAMES)


def tiny_config(model_type: str) -> Any:
    """The configuration of a tiny model of a type, without dropout."""
    with _quietly():
        config = _made(model_type)
    for part in _parts(config):
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    config.classifier_dropout = 0.0  # of heads whose family has no setting for it
    config.num_labels = 3
    return config


def _made(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[model_type]
    return kind(**_shrunk(kind()))


def _parts(config: Any) -> Any:
    yield config
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from _parts(getattr(config, name))


def _shrunk(config: Any) -> dict[str, Any]:
    """The keywords that make a configuration small, and those of its parts."""
    known = config.to_dict()
    sizes = {name: value for name, value in SIZES.items() if isinstance(known.get(name), int)}
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            sizes[name] = {"model_type": part.model_type} | _shrunk(part)
    tokens = TOKENS if "vocab_size" in known or "pad_token_id" in known else {}
    return sizes | tokens | OWN.get(config.model_type, {})


@contextlib.contextmanager
def _quietly() -> Any:
    """Defaults of a large vocabulary are remarked on beside a small one."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
