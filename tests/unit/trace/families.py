"""Tiny models of each kind that transformers has beside encoders."""

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, **GROUPED},
    "qwen2": {**SIZES, "num_key_value_heads": 2},
    "gpt2": {**SIZES, "n_positions": 64},
    "mistral": {**SIZES, **GROUPED, "sliding_window": 4},
    "gemma3_text": {**SIZES, **GROUPED, "sliding_window": 4},
    "bart": BART,
    "t5": {**T5, "decoder_start_token_id": 0},
    "mixtral": {**SIZES, **GROUPED, **EXPERTS},
    "jamba": {
        **SIZES,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
}
"""Causal decoders, one of them with a sliding window, encoder-decoders, experts, and state spaces."""


def tiny(kind: str, **changes: Any) -> Any:
    """A configuration of this kind, without dropout."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind](**{**KINDS[kind], **changes})
    for name, value in list(vars(config).items()):
        if ("drop" in name or "pdrop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config
