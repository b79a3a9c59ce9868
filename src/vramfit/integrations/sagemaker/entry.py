"""`main`: a training job from beginning to end: read, train, leave the model, or leave the reason."""

import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from vramfit.errors import VramfitError
from vramfit.integrations.sagemaker.hyperparameters import make_request, read_arguments
from vramfit.integrations.sagemaker.job import Job, output_folder, read_job
from vramfit.integrations.sagemaker.launcher import needs_torchrun, run_command, torchrun_command
from vramfit.integrations.sagemaker.metrics import MetricLines
from vramfit.runtime.training.interruption import Interrupted, stop_request
from vramfit.runtime.training.request import TrainRequest

STOPPED = (130, 143)
"""Exit codes after Ctrl-C and SIGTERM."""
NOT_THE_MODEL = ("checkpoints",)
RECORDS = ("run.json", "plan.json", "step.json", "metrics.jsonl", "tensorboard")
_TOOLKIT = "sagemaker_training.trainer"
"""In this process where SageMaker's toolkit calls `main` itself."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the training job that this process belongs to, and leave as SageMaker expects it.

    The same in script mode (hyperparameters come as arguments), in a container (they come in a file) and as the module
    of `sagemaker-training` (`SAGEMAKER_TRAINING_MODULE=vramfit.integrations.sagemaker:main`). The run goes on from the
    checkpoint folder where that holds one. Exit codes are those of `vramfit train`: 143 after SIGTERM and a checkpoint.

    Args:
        arguments: `--name value`; None takes the command line's.
    """
    attempt = _Attempt(list(sys.argv[1:] if arguments is None else arguments))
    code, reason = attempt.run()
    sys.stdout.flush()
    if _TOOLKIT not in sys.modules:
        sys.exit(code)
    if code in STOPPED:  # the toolkit would call anything that leaves quietly a success
        sys.stderr.flush()
        os._exit(code)
    if code:
        raise sys.modules[f"{_TOOLKIT.partition('.')[0]}.errors"].ClientError(reason)


class _Attempt:
    """One run of a job, and what is known of it when it fails."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._job: Job | None = None
        self._request: TrainRequest | None = None

    def run(self) -> tuple[int, str]:
        """Exit code and, where it is not 0, the reason."""
        try:
            self._run()
        except Interrupted as stopped:
            print(f"{stopped}.", flush=True)
            return stopped.exit_code, str(stopped)
        except VramfitError as error:
            return error.exit_code, self._fail(error)
        except Exception as error:
            traceback.print_exc()
            return 1, self._fail(error)
        return 0, ""

    def _run(self) -> None:
        self._job = read_job(read_arguments(self._arguments) if self._arguments else None)
        job, request = self._job, make_request(self._job)
        self._request = request
        _make_folder(job.checkpoint_dir)
        with stop_request(resumes=True) as stop:
            from vramfit.runtime.training.train import train

            stop.check()
        if needs_torchrun(job, request):
            run_command(torchrun_command(job, request))
        else:
            train(request, on_event=MetricLines().show)
        if job.current_host == job.hosts[0] and os.environ.get("RANK", "0") == "0":
            leave_model(Path(request.output), job)

    def _fail(self, error: BaseException) -> str:
        from vramfit.integrations.sagemaker.failure import reason_of, write_failure

        reason = reason_of(error, self._job, self._request)
        print(f"Error: {reason}", file=sys.stderr, flush=True)
        write_failure(output_folder(), reason)
        return reason


def leave_model(output: Path, job: Job) -> None:
    """Put the saved model where SageMaker packs it, and the records of the run beside other output."""
    for folder in (job.model_dir, job.output_data_dir):
        _make_folder(folder)
    for path in sorted(output.iterdir()):
        if path.name in NOT_THE_MODEL:
            continue
        place = (job.output_data_dir if path.name in RECORDS else job.model_dir) / path.name
        if path.is_dir():
            shutil.copytree(path, place, dirs_exist_ok=True)
        else:
            shutil.copy2(path, place)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VramfitError(f"cannot make {folder}: {error.strerror}", hint="is this a SageMaker job?") from None
