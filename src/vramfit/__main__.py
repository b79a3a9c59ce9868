"""`vramfit` and `python -m vramfit`: where both begin."""

import gc
import sys
from typing import NoReturn


def main() -> NoReturn:
    """The command line, imported without collecting garbage: it finds none and takes a quarter of a quick answer."""
    gc.disable()  # until a verb begins
    try:
        from vramfit.cli.main import main

        main()
    except KeyboardInterrupt:  # while the command line is imported, which has no words for it yet
        sys.exit(130)


if __name__ == "__main__":
    main()
