"""The Hugging Face Trainer: `check` says what is wrong with one, `fit_trainer` makes it right and fitting."""

from vramfit.integrations.trainer.checks import check
from vramfit.integrations.trainer.fit import fit_trainer

__all__ = ["check", "fit_trainer"]
