"""The data of a run: the rows of training and evaluation files, tokenized while the model's class is imported."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vramfit.errors import WorkloadError
from vramfit.models.anatomy import max_positions
from vramfit.models.hub import exported_file
from vramfit.models.resolve import ResolvedModel, find_model
from vramfit.models.tokenizers import load_tokenizer
from vramfit.records.plan import Plan
from vramfit.runtime.data.examples import check_learnable
from vramfit.runtime.data.samples import LONGEST, STRIDE, CheckedRows, Samples, read_rows
from vramfit.runtime.training.request import TrainRequest
from vramfit.stages import beside, tell
from vramfit.tasks.parts.heads import SINGLE
from vramfit.tasks.parts.reading import Tokenizing

if TYPE_CHECKING:
    from vramfit.runtime.trained import TrainedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What there is to learn from and to evaluate on."""

    resolved: ResolvedModel
    tokenizer: Any
    train: Samples
    evaluation: Samples | None
    max_length: int | None = None
    """Tokens at which texts are cut."""
    teacher_width: int | None = None
    """Numbers of a teacher's hidden states, where they are compared with a student's that has others."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(self.train.lengths)


def read_data(request: TrainRequest, plan: Plan | None, teacher: "TrainedModel | None" = None) -> Data:
    """The model's configuration and tokenizer, and both data sets, tokenized while the model's class is imported.

    Args:
        teacher: whose labels the data has, in its order, and whose length is not exceeded.

    Raises:
        UnknownModel, WorkloadError, VramfitError: whatever is wrong with the model's name or with a row.
    """
    if exported_file(request.model) is not None:
        hint = "give the folder that it was exported from"
        raise WorkloadError([f"{request.model} is an exported model (ONNX), which cannot be trained"], hint=hint)
    found = find_model(request.model, task=request.task, trust_remote_code=request.trust_remote_code)
    tokenizer = found.checked_first(lambda: load_tokenizer(request.model, found.config))
    limits = [max_positions(found.config) or LONGEST, request.seq or found.max_length]
    limits += [plan.workload.seq if plan is not None else None, getattr(tokenizer, "model_max_length", None)]
    limits += [teacher.max_length if teacher is not None else None]
    max_length = int(min(n for n in limits if n))
    how = Tokenizing(tokenizer=tokenizer, max_length=max_length, stride=min(STRIDE, max_length // 4))
    if teacher is not None:
        how = replace(how, label_names=teacher.label_names)
    problem = request.problem or (teacher.problem if teacher is not None else None)
    rows = found.checked_first(lambda: _read(request, how, problem))
    with beside(lambda: [each.tokenized() for each in rows]) as samples:
        resolved = found.resolve()
        train, *others = samples()
    evaluation = others[0] if others else None
    return Data(resolved=resolved, tokenizer=tokenizer, train=train, evaluation=evaluation, max_length=max_length)


def _read(request: TrainRequest, how: Tokenizing, problem: str | None) -> list[CheckedRows]:
    """The rows of the training data, and of the evaluation data where that is given."""
    tell(f"reading {request.data}")
    source = replace(request.source(request.data), problem=problem)
    train = read_rows(source, how, seed=request.seed)
    problem = train.how.problem
    check_learnable(source, train.examples)
    if request.label_smoothing and problem not in (None, SINGLE):
        raise WorkloadError([f"label_smoothing is for one class a row, and the data has problem {problem}"])
    if request.eval_data is None:
        return [train]
    how = replace(how, label_names=train.how.label_names)
    return [train, read_rows(replace(request.source(request.eval_data), problem=problem), how, seed=request.seed)]
