"""Write `things.conll`: the messages of `make_messages.py` word by word, with the thing each is about marked.

python examples/make_things.py
"""

import itertools
import random
from pathlib import Path

from make_messages import COMPLAINT, PRAISE, THINGS


def tagged(text: str, thing: str) -> list[tuple[str, str]]:
    """Words and tags of a sentence."""
    before, after = text.split("{thing}")
    first, *rest = thing.split()
    marked = [(first, "B-THING"), *((word, "I-THING") for word in rest)]
    return [*((word, "O") for word in before.split()), *marked, *((word, "O") for word in after.split())]


def main() -> None:
    sentences = [tagged(text, thing) for text, thing in itertools.product([*PRAISE, *COMPLAINT], THINGS)]
    random.Random(0).shuffle(sentences)
    blocks = ["".join(f"{word} {tag}\n" for word, tag in sentence) for sentence in sentences]
    (Path(__file__).parent / "things.conll").write_text("\n".join(blocks), encoding="utf-8")


if __name__ == "__main__":
    main()
