"""`vramfit` and `python -m vramfit`: where both begin."""

import gc
from typing import NoReturn


def main() -> NoReturn:
    """The command line, imported without collecting garbage: it finds none and takes a quarter of a quick answer."""
    gc.disable()  # until a verb begins
    from vramfit.cli.main import main

    main()


if __name__ == "__main__":
    main()
