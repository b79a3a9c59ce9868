"""Tasks, one file each: everything about a task is in its file, and nothing else names it.

A module of this folder with a `TASK`, an instance of `tasks.base.Task`, is a task. Whoever needs one asks for it by
name or goes through all of them.
"""

import pkgutil
from functools import cache
from importlib import import_module

from vramfit.errors import WorkloadError, nearest_names
from vramfit.tasks.base import Task

__all__ = [
    "DEFAULT",
    "Task",
    "all_tasks",
    "encoder_alone",
    "find_task",
    "ranking_task",
    "task_names",
    "trained_tasks",
    "vector_task",
]
DEFAULT = "sequence-classification"
"""The task where none is named."""


@cache
def all_tasks() -> tuple[Task, ...]:
    """Every task, in the order in which lists show them."""
    modules = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    found = [module.TASK for module in modules if hasattr(module, "TASK")]
    return tuple(sorted(found, key=lambda task: (task.rank, task.name)))


def task_names() -> tuple[str, ...]:
    """Their names, in the same order."""
    return tuple(task.name for task in all_tasks())


def trained_tasks() -> tuple[str, ...]:
    """Names of those that vramfit reads data for, trains, evaluates and predicts."""
    return tuple(task.name for task in all_tasks() if task.is_trained)


def find_task(name: str) -> Task:
    """The task of a name.

    Raises:
        WorkloadError: there is none; with the nearest name.
    """
    found = next((task for task in all_tasks() if task.name == name), None)
    if found is None:
        names = task_names()
        nearest = nearest_names(str(name), names, 1)[0]
        raise WorkloadError([f"task {name!r} is not one of {', '.join(names)} (nearest: {nearest})"])
    return found


def encoder_alone() -> Task:
    """The task of an encoder without a head."""
    return next(task for task in all_tasks() if not task.has_head)


def vector_task() -> Task:
    """The task that learns vectors of texts."""
    return next(task for task in all_tasks() if task.pools_itself)


def ranking_task() -> Task:
    """The task that scores candidates of a query."""
    return next(task for task in all_tasks() if task.ranks_candidates)
