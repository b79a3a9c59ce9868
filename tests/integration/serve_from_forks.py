"""`vramfit` whose worker processes are forked from one that has imported torch, which a user's import themselves.

Run as a script: `python serve_from_forks.py serve MODEL …`.
"""

import multiprocessing

PRELOADED = ["vramfit.serve.engine", "vramfit.serve.loading", "transformers.models.bert.modeling_bert"]


def main() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    multiprocessing.get_context = lambda method=None: context  # type: ignore[assignment]
    from vramfit.cli.main import main as vramfit

    vramfit()


if __name__ == "__main__":
    main()
