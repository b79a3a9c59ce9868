"""Stacked bars as SVG: what a forward pass keeps, by how it follows the length."""

from dataclasses import dataclass
from html import escape

MIB = 2**20
WIDTH, HEIGHT = 860, 470
LEFT, BOTTOM, TOP = 64, 366, 64
BAR = 74
COLOURS = {"fixed": "#9aa5b1", "tokens": "#4c8dae", "square": "#e07a3f"}
NAMES = {
    "fixed": "weights and workspaces: always the same",
    "tokens": "kept for each token: doubles with the length",
    "square": "attention scores, kept for each pair of tokens: fourfold",
}
TITLES = {"eager": "eager attention", "sdpa": "fused attention (sdpa)"}
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2933}.quiet{fill:#52606d;font-size:12px}"
    ".in{fill:#fff;font-size:12px}.head{font-size:15px;font-weight:600}.back{fill:#fff}"
    ".grid{stroke:#e4e7eb}.mark{stroke:#52606d}.line{stroke:#1f2933}"
    "@media (prefers-color-scheme:dark){text{fill:#e4e7eb}.quiet{fill:#a0aab4}.in{fill:#fff}.back{fill:#12161c}"
    ".grid{stroke:#2b333d}.mark{stroke:#a0aab4}.line{stroke:#e4e7eb}}"
)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One length of one way of attention."""

    group: str
    label: str
    parts: dict[str, int]
    """`fixed`, `tokens`, and `square <operator>` → bytes."""
    measured_bytes: int | None
    original_bytes: int | None

    def stacked(self) -> dict[str, int]:
        """Bytes by law."""
        sums = dict.fromkeys(COLOURS, 0)
        for name, size in self.parts.items():
            sums[name.split()[0]] += size
        return sums


def draw(bars: list[Bar]) -> str:
    """The picture; marks for what was measured and for the figures of 2019 where there are any."""
    top = max(max(sum(bar.parts.values()), bar.measured_bytes or 0, bar.original_bytes or 0) for bar in bars) / MIB
    scale = (BOTTOM - TOP) / top
    pieces = [*_frame(top, scale)]
    groups = list(dict.fromkeys(bar.group for bar in bars))
    step = BAR + 38
    for place, bar in enumerate(bars):
        x = LEFT + 28 + place * step + groups.index(bar.group) * 34
        pieces += _bar(bar, x, scale)
    for group in groups:
        places = [n for n, bar in enumerate(bars) if bar.group == group]
        middle = LEFT + 28 + (places[0] + places[-1]) / 2 * step + groups.index(group) * 34 + BAR / 2
        pieces.append(f'<text x="{middle:.0f}" y="{BOTTOM + 40}" text-anchor="middle">{TITLES[group]}</text>')
    pieces += _legend(bars)
    body = "\n".join(pieces)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="What a forward pass of BERT-base keeps at 128, 256 and 512 tokens">\n<style>{STYLE}</style>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" class="back"/>\n{body}\n</svg>\n'
    )


def _frame(top: float, scale: float) -> list[str]:
    pieces = [
        f'<text class="head" x="{LEFT}" y="26">What a forward pass with gradients keeps: BERT-base, one sample</text>',
        f'<text class="quiet" x="{LEFT}" y="46">MiB allocated at the peak, by tokens per sample</text>',
    ]
    for mib in range(0, int(top) + 1, 250):
        y = BOTTOM - mib * scale
        pieces.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 20}" class="grid"/>')
        pieces.append(f'<text class="quiet" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{mib:,}</text>')
    return pieces


def _bar(bar: Bar, x: float, scale: float) -> list[str]:
    pieces, y = [], float(BOTTOM)
    for law, size in bar.stacked().items():
        height = size / MIB * scale
        y -= height
        pieces.append(f'<rect x="{x}" y="{y:.1f}" width="{BAR}" height="{height:.1f}" fill="{COLOURS[law]}"/>')
        if height > 15:
            label = f"{size / MIB:,.0f}"
            pieces.append(
                f'<text class="in" x="{x + BAR / 2}" y="{y + height / 2 + 4:.1f}" text-anchor="middle">{label}</text>'
            )
    if bar.measured_bytes is not None:
        at = BOTTOM - bar.measured_bytes / MIB * scale
        pieces.append(f'<path d="M{x - 7} {at:.1f}H{x + BAR + 7}" class="line" stroke-width="2"/>')
    if bar.original_bytes is not None:
        at = BOTTOM - bar.original_bytes / MIB * scale
        pieces.append(
            f'<path d="M{x - 7} {at:.1f}H{x + BAR + 7}" class="mark" stroke-width="2" stroke-dasharray="3 3"/>'
        )
    pieces.append(f'<text x="{x + BAR / 2}" y="{BOTTOM + 19}" text-anchor="middle">{escape(bar.label)}</text>')
    return pieces


def _legend(bars: list[Bar]) -> list[str]:
    pieces = []
    for place, (law, name) in enumerate(reversed(NAMES.items())):
        y = BOTTOM + 62 + place * 18
        pieces.append(f'<rect x="{LEFT}" y="{y - 10}" width="12" height="12" fill="{COLOURS[law]}"/>')
        pieces.append(f'<text class="quiet" x="{LEFT + 20}" y="{y}">{name}</text>')
    x, y = LEFT + 470, BOTTOM + 58
    pieces.append(f'<path d="M{x} {y}h26" class="mark" stroke-width="2" stroke-dasharray="3 3"/>')
    pieces.append(f'<text class="quiet" x="{x + 34}" y="{y + 4}">the study of 2019</text>')
    if any(bar.measured_bytes is not None for bar in bars):
        pieces.append(f'<path d="M{x} {y + 18}h26" class="line" stroke-width="2"/>')
        pieces.append(f'<text class="quiet" x="{x + 34}" y="{y + 22}">measured; the bars are predicted</text>')
    else:
        pieces.append(f'<text class="quiet" x="{x}" y="{y + 22}">the bars are predicted, without a GPU</text>')
    return pieces
