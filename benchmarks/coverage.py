"""Which types of models can be predicted? Every type of transformers that has a head for sequence classification.

    python benchmarks/coverage.py run results.jsonl            # goes on where an earlier call stopped
    python benchmarks/coverage.py run results.jsonl llama t5   # these types only, again
    python benchmarks/coverage.py page results.jsonl           # writes docs/coverage.md

Each type is built from its default configuration with two layers, and `estimate` answers for one training step and one
inference at 64 tokens, on the meta device. A default that cannot be built, or that two layers leave without a kind of
layer it needs, is corrected by as little as possible (`CORRECTIONS`). Where bf16 is refused, fp32 is tried.
"""

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

from forked import Child, import_all, read_lines
from pages import page, paragraph, table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "coverage.md"
SEQ, BATCH, NUM_LAYERS, TIMEOUT_S = 64, 4, 2, 300.0
PRECISIONS = {"train": ("amp-bf16", "fp32"), "infer": ("bf16", "fp32")}
DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
DEPTHS += ("num_decoder_layers", "num_encoder_layers")
"""Names that configurations have for the number of their layers."""
PARTS = ("text_config", "encoder", "decoder")
"""Configurations inside of configurations."""
TWO_KINDS = "only one kind of layer in its first two: one layer of each kind"
NO_HEAD_SIZE = "no head size: head_dim 128"
CORRECTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "cohere_compass_text": (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        "no rotary positions: rope_theta 10,000",
    ),
    "deepseek_v2": ({"num_experts_per_tok": 6}, "no number of experts per token: 6, as published"),
    "gpt_neo": (
        {"attention_types": [[["global", "local"], 1]]},
        "attention types for more than two layers: global and local",
    ),
    "esm": ({"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}, "no vocabulary: 33 tokens"),
    "hunyuan_v1_dense": ({"head_dim": 128}, NO_HEAD_SIZE),
    "hunyuan_v1_moe": ({"head_dim": 128}, NO_HEAD_SIZE),
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1}, TWO_KINDS),
    "ministral": ({"head_dim": 128}, NO_HEAD_SIZE),
    "nemotron": ({"num_key_value_heads": 48}, "no number of key heads: 48, as many as query heads"),
    "qwen3_5": (
        {"text_config": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}},
        TWO_KINDS,
    ),
    "qwen3_5_text": ({"layer_types": ["linear_attention", "full_attention"]}, TWO_KINDS),
    "qwen3_next": ({"layer_types": ["linear_attention", "full_attention"]}, TWO_KINDS),
    "reformer": (
        {"attn_layers": ["local", "lsh"], "axial_pos_shape": (8, 8), "is_decoder": False},
        "axial positions do not make up the length: axial_pos_shape (8, 8), attn_layers local and lsh",
    ),
    "t5": ({"decoder_start_token_id": 0}, "no first token of the decoder: 0, as published"),
    "xmod": ({"default_language": "en_XX"}, "no language: en_XX"),
    "zamba": (
        {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
        "layers share weights in pairs: four layers, of two kinds",
    ),
    "zamba2": ({"layers_block_type": ["linear_attention", "hybrid"]}, TWO_KINDS),
}
"""Type → settings, and why the default does not do."""


BECAUSE = {
    "ibert": "in training its quantizers depend on the values of activations; inference is predicted",
    "jetmoe": "it reads on the host how many tokens the router gave to each expert",
    "layoutlmv2": "it needs the package detectron2",
    "yoso": "its own backward pass multiplies fp32 by bf16 under autocast, which torch refuses",
}
"""Type → what lies behind a refusal, in words."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("run", "page"))
    parser.add_argument("results", type=Path)
    parser.add_argument("types", nargs="*", help="types to try again; by default all that have no line yet")
    options = parser.parse_args(arguments)
    if options.verb == "page":
        PAGE.write_text(make_page(read_lines(options.results, "type")), encoding="utf-8")
        print(f"wrote {PAGE}")
        return 0
    return run(options.results, options.types)


def run(out: Path, asked: list[str]) -> int:
    """Add a line for each type that the file does not have, or for those asked for."""
    import_all()
    done = {line["type"] for line in read_lines(out, "type")}
    left = asked or [name for name in all_types() if name not in done]
    with out.open("a", encoding="utf-8") as file:
        for name in left:
            line = {"type": name, **Child(try_type, name).result(TIMEOUT_S), **versions()}
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(name, *(line[mode] for mode in PRECISIONS if mode in line), line.get("error", ""), flush=True)
    lines = read_lines(out, "type")
    print(f"{sum(map(is_estimated, lines))} of {len(lines)} types are estimated")
    return 0


def versions() -> dict[str, str]:
    """What an answer depends on."""
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__, "date": date.today().isoformat()}


def all_types() -> list[str]:
    """Types with a head for sequence classification."""
    from transformers.models.auto import modeling_auto

    return sorted(modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)


def is_estimated(line: dict[str, Any]) -> bool:
    """Whether training and inference both have a figure."""
    return all("peak_requested_bytes" in line.get(mode, {}) for mode in PRECISIONS)


def try_type(name: str) -> dict[str, Any]:
    """What `estimate` says of a type, in a process of its own."""
    config = make_config(name)
    found: dict[str, Any] = {mode: try_mode(config, mode) for mode in PRECISIONS}
    return found | ({"correction": CORRECTIONS[name][1]} if name in CORRECTIONS else {})


def try_mode(config: Any, mode: str) -> dict[str, Any]:
    """The first precision that is answered; else the first refusal."""
    import vramfit
    from vramfit.errors import VramfitError

    refusals = []
    for precision in PRECISIONS[mode]:
        try:
            made = vramfit.estimate(config, mode=mode, batch=BATCH, seq=SEQ, precision=precision, **job(mode))
            refused = {"refused": refusals[0]} if refusals else {}
            return {"precision": precision, "peak_requested_bytes": made.peak_requested_bytes, **refused}
        except VramfitError as error:
            refusals.append(f"{type(error).__name__}: {error}"[:300])
    return {"error": refusals[0]}


def job(mode: str) -> dict[str, Any]:
    return {"task": "sequence-classification"} | ({"optimizer": "adamw"} if mode == "train" else {})


def make_config(name: str) -> Any:
    """The default configuration of a type with two layers, corrected where it must be."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    settings, _ = CORRECTIONS.get(name, ({}, ""))
    shallow = dict.fromkeys((d for d in DEPTHS if isinstance(getattr(kind(), d, None), int)), NUM_LAYERS)
    try:
        config = kind(**{**own_names(kind, shallow), **settings})
    except NotImplementedError:  # Funnel counts blocks, and its default is small enough
        config = kind(**settings)
    for part in PARTS:
        inner = getattr(config, part, None)
        if hasattr(inner, "num_hidden_layers") and inner.num_hidden_layers != NUM_LAYERS:
            cut(inner)
            for deeper in ("text_config",):
                if hasattr(getattr(inner, deeper, None), "num_hidden_layers"):
                    cut(getattr(inner, deeper))
    return config


def cut(config: Any) -> None:
    """Two layers of a configuration that lies in another one: with the kinds of its first two."""
    config.num_hidden_layers = NUM_LAYERS
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[:NUM_LAYERS]


def own_names(kind: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """One name for each depth: some are other names of the same."""
    return {kind.attribute_map.get(name, name): value for name, value in settings.items()}


def make_page(lines: list[dict[str, Any]]) -> str:
    """What is known of each type, as a page of the documentation."""
    known = [line for line in lines if is_estimated(line)]
    others = [line for line in lines if not is_estimated(line)]
    made_with = lines[0]
    return page(
        "# Types of models",
        paragraph(
            f"`vramfit` predicts training and inference of {len(known)} of the {len(lines)} types that have a head",
            f"for sequence classification in transformers {made_with['transformers']}. Each was built from its",
            f"default configuration with two layers and traced on the meta device at {SEQ} tokens. This shows that a",
            "prediction can be made, not how close it is; [Accuracy](accuracy.md) compares predictions with a GPU.",
        ),
        "## Not predicted",
        table(["type", "reason"], [(f"`{line['type']}`", reason(line)) for line in others]),
        paragraph(
            "A model may branch on its mask, its positions and its tokens, which a trace knows from the inputs of the",
            "step. A model that branches on computed values is refused, with the name of the module that does.",
        ),
        "## Predicted",
        paragraph(", ".join(f"`{line['type']}`" for line in known)),
        "## Predicted in fp32 only",
        table(
            ["type", "mode", "why not in bf16"],
            [
                (f"`{line['type']}`", mode, in_words(line["type"], line[mode]["refused"]))
                for line in known
                for mode in PRECISIONS
                if "refused" in line[mode]
            ],
        ),
        "## Default configurations that were completed",
        table(
            ["type", "the default has", "set instead"],
            [
                (f"`{line['type']}`", *CORRECTIONS[line["type"]][1].split(": "))
                for line in lines
                if "correction" in line
            ],
        ),
        f"Made on {max(line['date'] for line in lines)} by `benchmarks/coverage.py` with torch {made_with['torch']}.",
    )


def reason(line: dict[str, Any]) -> str:
    """Why a type is not predicted."""
    said = line.get("error") or next(line[mode]["error"] for mode in PRECISIONS if "error" in line[mode])
    return in_words(line["type"], said)


def in_words(name: str, refusal: str) -> str:
    """What lies behind a refusal; where nobody looked, what was said, without the class of the error."""
    return BECAUSE.get(name) or refusal.partition(": ")[2] or refusal


if __name__ == "__main__":
    sys.exit(main())
