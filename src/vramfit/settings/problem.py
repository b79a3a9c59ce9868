"""`problem`: what a classification head learns, as transformers means it: one class, several labels, or numbers."""

from collections.abc import Iterator

from vramfit.settings.setting import Module, Setting, Workload
from vramfit.settings.values import Choice
from vramfit.tasks import find_task
from vramfit.tasks.parts.heads import PROBLEM_TYPES, PROBLEMS, SINGLE


def leaves_labels_out(w: Workload) -> bool:
    """Whether the loss leaves out labels that are ignored, so that a batch can be filled up with them."""
    return find_task(w.task).can_record and w.problem in (None, SINGLE)


class Problem(Setting):
    keyword, order, group, applied = "problem", 91, "job", 4
    value = Choice(names=PROBLEMS, optional=True)
    label, modes = "The head learns", ("train",)
    help = (
        "What a classification head learns: one class per text, several labels, or numbers. Default: what the data "
        "says; single where there is none."
    )
    in_run = True
    is_measured = on_page = False
    in_trace = "step"
    asked = (leaves_labels_out,)

    def contradictions(self, w: Workload) -> Iterator[str]:
        if not find_task(w.task).has_problems:
            yield f"problem {w.problem} is not for {w.task}, whose head learns one thing"
        elif not w.trains:
            yield f"problem is for mode train, not {w.mode}: a model's folder says what its head has learned"

    def apply(self, model: Module, w: Workload) -> None:
        config = getattr(model, "config", None)
        if config is not None:
            config.problem_type = PROBLEM_TYPES[w.problem or SINGLE]

    def words(self, w: Workload) -> str | None:
        return None if w.problem in (None, SINGLE) else f"problem {w.problem}"
