"""Draw the pictures of `docs/concepts.md` from predictions: how a step goes, and the four numbers.

python scripts/draw_concepts.py
"""

from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parents[1] / "docs" / "images"
MIB, GIB = 2**20, 2**30
JOB: dict[str, Any] = {
    "model": "bert-base-uncased",
    "batch": 16,
    "seq": 128,
    "gpu": "h200",
    "torch_version": "2.11",
}
COLOURS = {
    "weights": "#5b6b7b",
    "optimizer": "#9aa5b1",
    "gradients": "#7b6ca8",
    "activations": "#4c8dae",
    "temporaries": "#e07a3f",
    "workspaces": "#c9a227",
    "inputs": "#6aa84f",
}
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2933}.quiet{fill:#52606d;font-size:12px}"
    ".head{font-size:15px;font-weight:600}.in{fill:#fff;font-size:12px}.back{fill:#fff}"
    ".grid{stroke:#e4e7eb}.mark{stroke:#52606d}"
    "@media (prefers-color-scheme:dark){text{fill:#e4e7eb}.quiet{fill:#a0aab4}.in{fill:#fff}.back{fill:#12161c}"
    ".grid{stroke:#2b333d}.mark{stroke:#a0aab4}}"
)


def main() -> None:
    """Write the pictures."""
    import vramfit

    estimate = vramfit.estimate(**JOB)
    IMAGES.mkdir(exist_ok=True)
    for name, drawn in pictures(estimate).items():
        (IMAGES / name).write_text(drawn, encoding="utf-8")
        print(f"wrote {IMAGES / name}")


def pictures(estimate: Any) -> dict[str, str]:
    """File → picture."""
    return {"concept-step.svg": step(estimate), "concept-numbers.svg": numbers(estimate)}


def step(estimate: Any) -> str:
    """What is allocated through a steady step, by category, with its parts under it."""
    points = estimate.timeline
    width, left, top, bottom = 860, 64, 60, 300
    across = (width - left - 20) / (len(points) - 1)
    scale = (bottom - top) / max(point.allocated_bytes for point in points)
    pieces = [
        f'<text class="head" x="{left}" y="26">One training step of BERT-base, batch 16 × 128 tokens, fp32</text>',
        f'<text class="quiet" x="{left}" y="46">GiB allocated, from the first request to the last</text>',
    ]
    for gib in range(1 + points[0].allocated_bytes * 4 // GIB):
        y = bottom - gib * GIB * scale
        if y > top - 12:
            pieces.append(f'<path d="M{left} {y:.1f}H{width - 20}" class="grid"/>')
            pieces.append(f'<text class="quiet" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{gib}</text>')
    below = [0] * len(points)
    for category, colour in COLOURS.items():
        above = [b + point.breakdown.get(category, 0) for b, point in zip(below, points, strict=True)]
        edge = [f"{left + i * across:.1f},{bottom - size * scale:.1f}" for i, size in enumerate(above)]
        back = [f"{left + i * across:.1f},{bottom - size * scale:.1f}" for i, size in enumerate(below)]
        pieces.append(f'<polygon points="{" ".join([*edge, *reversed(back)])}" fill="{colour}"/>')
        below = above
    pieces += _parts(points, left, across, bottom) + _legend(left, bottom + 62)
    return _svg(pieces, width, bottom + 100, "How memory rises and falls during a training step")


def _parts(points: Any, left: float, across: float, bottom: float) -> list[str]:
    pieces, names = [], [point.part for point in points]
    for name in dict.fromkeys(names):
        first, last = names.index(name), len(names) - 1 - names[::-1].index(name)
        x0, x1 = left + first * across, left + last * across
        pieces.append(f'<path d="M{x0:.1f} {bottom + 8}H{x1:.1f}" class="mark"/>')
        if x1 - x0 > 40:
            pieces.append(f'<text x="{(x0 + x1) / 2:.1f}" y="{bottom + 26}" text-anchor="middle">{name}</text>')
    return pieces


def _legend(left: float, y: float) -> list[str]:
    pieces = []
    for place, (category, colour) in enumerate(COLOURS.items()):
        x = left + place * 112
        pieces.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        pieces.append(f'<text class="quiet" x="{x + 18}" y="{y}">{category}</text>')
    return pieces


def numbers(estimate: Any) -> str:
    """The four numbers as bars of one job."""
    told = {
        "requested": (estimate.peak_requested_bytes, "what tensors ask for"),
        "allocated": (estimate.peak_allocated_bytes, "blocks of 512 bytes and more, handed out"),
        "reserved": (estimate.peak_reserved_bytes, "segments taken from the driver: this decides"),
        "process": (estimate.peak_process_bytes, "with the CUDA context: what nvidia-smi shows"),
    }
    width, left, longest = 860, 100, 400
    scale = longest / estimate.peak_process_bytes
    pieces = [f'<text class="head" x="{left}" y="26">Four numbers for one job, in MiB</text>']
    for place, (name, (size, meaning)) in enumerate(told.items()):
        y = 46 + place * 34
        pieces.append(f'<text x="{left - 10}" y="{y + 17}" text-anchor="end">{name}</text>')
        pieces.append(f'<rect x="{left}" y="{y}" width="{size * scale:.1f}" height="24" fill="#4c8dae"/>')
        pieces.append(f'<text class="in" x="{left + 8}" y="{y + 16}">{size / MIB:,.0f}</text>')
        pieces.append(f'<text class="quiet" x="{left + longest + 14}" y="{y + 16}">{meaning}</text>')
    return _svg(pieces, width, 196, "Requested, allocated, reserved and process memory of one job")


def _svg(pieces: list[str], width: int, height: int, label: str) -> str:
    body = "\n".join(pieces)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">\n'
        f'<style>{STYLE}</style>\n<rect width="{width}" height="{height}" class="back"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    main()
