"""The Hugging Face Trainer: `check` says what is wrong with one, `fit_trainer` makes it right and fitting.

`MonitorCallback` watches the memory of any, and changes nothing.
"""

from vramfit.integrations.trainer.checks import check
from vramfit.integrations.trainer.fit import fit_trainer
from vramfit.integrations.trainer.monitoring import MonitorCallback

__all__ = ["MonitorCallback", "check", "fit_trainer"]
