"""Plans for a decoder of 0.6 billion weights, of Qwen3's shape, at 512 tokens: full fine-tuning, LoRA and QLoRA.

Predicted, and not run: no figure here was measured on a GPU.

    python benchmarks/decoder_plans.py        # writes benchmarks/results/decoder_plans.json
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "decoder_plans.json"
GPU, BATCH, SEQ, RANK = "h200", 8, 512, 16
CASES: dict[str, dict[str, Any]] = {
    "full fine-tuning": {"memory": "12GiB"},
    "LoRA": {"memory": "4GiB", "lora": RANK, "lora_targets": "all-linear"},
    "QLoRA": {"memory": "2GiB", "lora": RANK, "lora_targets": "all-linear", "quantize": "nf4"},
}
"""What learns → what the plan is asked for."""


def qwen3_shape() -> Any:
    """28 layers of 1,024, 16 heads of 128 that share 8 of keys and values, 3,072 inside, 151,669 words."""
    from transformers import Qwen3Config

    return Qwen3Config(
        num_hidden_layers=28,
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151_669,
        tie_word_embeddings=True,
        eos_token_id=151_643,
        bos_token_id=151_643,
    )


def main() -> None:
    """Plan each case, print and write what was planned."""
    import vramfit

    found = {}
    for name, asked in CASES.items():
        plan = vramfit.plan(qwen3_shape(), batch=BATCH, seq=SEQ, gpu=GPU, **asked)
        w, estimate = plan.workload, plan.estimate
        found[name] = {
            "memory": asked["memory"],
            "micro_batch": w.micro_batch,
            "precision": w.precision,
            "checkpointing": w.checkpointing,
            "optimizer": w.optimizer,
            "offload": w.offload,
            "peak_allocated_bytes": estimate.peak_allocated_bytes,
            "safe_reserved_bytes": estimate.safe_reserved_bytes,
            "step_s": round(plan.step_time_s, 3),
        }
        print(name, found[name], flush=True)
    made = {"gpu": GPU, "batch": BATCH, "seq": SEQ, "predicted_only": True, "plans": found}
    RESULTS.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
