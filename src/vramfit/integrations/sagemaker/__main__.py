"""What a container runs: SageMaker starts it with `train` or with `serve`."""

import os
import sys

from vramfit.errors import WorkloadError
from vramfit.integrations.sagemaker.entry import main
from vramfit.integrations.sagemaker.job import base_folder, serve_options

USAGE = "vramfit on SageMaker: the container is started with train or with serve"


def run(arguments: list[str]) -> None:
    """Train, or serve the model that a job left."""
    action, others = (arguments[0], arguments[1:]) if arguments else ("", [])
    if action == "train":
        main(others)
    elif action == "serve":
        try:
            command = [sys.executable, "-m", "vramfit", "serve", *serve_arguments(others)]
        except WorkloadError as error:
            sys.exit(f"Error: {error}")
        os.execv(command[0], command)  # in the place of this process, which signals are sent to
    else:
        sys.exit(USAGE)


def serve_arguments(given: list[str]) -> list[str]:
    """What `vramfit serve` is told in a container; `VRAMFIT_SERVE` holds options, such as `--memory 2GiB`."""
    port = os.environ.get("SAGEMAKER_BIND_TO_PORT", "8080")
    return [str(base_folder() / "model"), "--host", "0.0.0.0", "--port", port, *serve_options(), *given]


if __name__ == "__main__":
    run(sys.argv[1:])
