"""Draw the evidence: errors of predictions, speed against peers, and memory by technique, for light and dark pages.

    python scripts/draw_evidence.py

The first two come from committed results, the third from predictions.
"""

import sys
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "benchmarks"))
WIDTH, LEFT, LONGEST, ROW = 860, 230, 290, 30
GIB = 2**30
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2933}.quiet{fill:#52606d;font-size:12px}"
    ".head{font-size:15px;font-weight:600}.back{fill:#fff}.ours{fill:#2f7fb5}.theirs{fill:#9aa5b1}"
    "@media (prefers-color-scheme:dark){text{fill:#e4e7eb}.quiet{fill:#a0aab4}.back{fill:#12161c}"
    ".ours{fill:#5aa9dd}.theirs{fill:#5b6b7b}}"
)
JOB: dict[str, Any] = {"model": "bert-large-uncased", "batch": 32, "seq": 512, "gpu": "h200", "torch_version": "2.11"}
STEPPED = {"loop": "stepper", "optimizer": "adamw-fused", "precision": "amp-bf16", "allocator": "expandable"}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "fp32, AdamW": {},
    "amp-bf16": {"precision": "amp-bf16"},
    "… and fused AdamW": {"precision": "amp-bf16", "optimizer": "adamw-fused"},
    "… in micro-batches of 8": {**STEPPED, "micro_batch": 8},
    "… and checkpointing": {**STEPPED, "micro_batch": 8, "checkpointing": "full"},
    "… and 8-bit AdamW": {**STEPPED, "micro_batch": 8, "checkpointing": "full", "optimizer": "adamw-8bit"},
    "optimizer in host memory": {**STEPPED, "micro_batch": 8, "checkpointing": "full", "offload": "optimizer"},
    "layers in host memory too": {**STEPPED, "micro_batch": 8, "checkpointing": "full", "offload": "weights"},
}
"""Bar → settings of the job."""
PREDICTORS = {
    "vramfit, allocated": "vramfit",
    "torch-preflight": "torch-preflight",
    "rule of thumb": "rule of thumb",
    "accelerate estimate-memory": "accelerate estimate-memory",
    "MemTracker": "torch MemTracker",
}


def main() -> None:
    """Write the pictures."""
    for name, drawn in pictures().items():
        (IMAGES / name).write_text(drawn, encoding="utf-8")
        print(f"wrote {name}")


def pictures() -> dict[str, str]:
    """File → picture."""
    return {"evidence-accuracy.svg": accuracy(), "evidence-speed.svg": speed(), "evidence-techniques.svg": techniques()}


def accuracy() -> str:
    """Median errors on the same measured runs."""
    from peers import read, summarise

    lines, _ = read()
    rows = []
    for peer, name in PREDICTORS.items():
        s = summarise([line for line in lines if line["peer"] == peer])
        told = f"{100 * s['median_error']:.1f} %; worst {100 * s['worst_error']:,.1f} %; too low in "
        rows.append((name, s["median_error"], f"{told}{100 * s['unsafe_share']:.0f} % of {s['num_cases']} runs"))
    head = "Error of the predicted peak (median), on measured runs of an H200"
    return _bars(head, "Too low means: a run that was predicted to fit would die.", rows)


def speed() -> str:
    """Tokens a second of fine-tuning under a cap."""
    import readme_runs

    found = {(n["model"], n["side"], n["cap"], n["lengths"]): n for n in readme_runs.packed_lines()}
    rows = []
    for model, name in readme_runs.SHOWN.items():
        sides = {"vramfit": readme_runs.OURS} | {peer: (side,) for side, peer in readme_runs.PEERS.items()}
        for side, keys in sides.items():
            line = readme_runs.fastest(found, model, keys, "real")
            if line is not None:
                rate = round(line["tokens_per_s"], -3)
                rows.append((f"{name}: {side}", rate, f"{rate:,.0f}"))
    head = "Fine-tuning on 1,000 reviews in 11.17 GiB of an H200: real tokens per second"
    return _bars(
        head, "Effective batch 64, bf16 autocast, fused AdamW; each peer at the batch size that it finds.", rows
    )


def techniques() -> str:
    """What is reserved by the same job with one technique after another."""
    import vramfit

    rows = []
    for name, settings in TECHNIQUES.items():
        reserved = vramfit.estimate(**JOB, **settings).safe_reserved_bytes
        rows.append((name, reserved, f"{reserved / GIB:.2f} GiB"))
    head = "BERT-large, effective batch 32 × 512 tokens, all parameters trained: reserved memory"
    return _bars(head, "Predicted for an H200. Every bar trains with the same effective batch.", rows, ours="")


def _bars(head: str, below: str, rows: list[tuple[str, float, str]], ours: str = "vramfit") -> str:
    most = max(size for _, size, _ in rows)
    pieces = [f'<text class="head" x="16" y="26">{head}</text>', f'<text class="quiet" x="16" y="46">{below}</text>']
    for place, (name, size, told) in enumerate(rows):
        y = 62 + place * ROW
        long = max(2.0, LONGEST * size / most)
        kind = "ours" if ours in name else "theirs"
        pieces.append(f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        pieces.append(f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{long:.1f}" height="22" rx="2"/>')
        pieces.append(f'<text class="quiet" x="{LEFT + long + 8:.1f}" y="{y + 16}">{escape(told)}</text>')
    height = 70 + len(rows) * ROW
    body = "\n".join([f'<rect class="back" width="{WIDTH}" height="{height}"/>', *pieces])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(head)}">\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    main()
