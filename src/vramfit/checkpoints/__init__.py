"""Checkpoints: what the files hold and what is wrong with them, told from headers, before anything is loaded."""

from vramfit.checkpoints.cache import cached_snapshot
from vramfit.checkpoints.entry import TensorEntry
from vramfit.checkpoints.files import CheckpointFiles, find_checkpoint
from vramfit.checkpoints.inspection import Inspection, inspect_checkpoint, inspect_config
from vramfit.checkpoints.matching import ShapeMismatch
from vramfit.checkpoints.reading import read_entries

__all__ = [
    "CheckpointFiles",
    "Inspection",
    "ShapeMismatch",
    "TensorEntry",
    "cached_snapshot",
    "find_checkpoint",
    "inspect_checkpoint",
    "inspect_config",
    "read_entries",
]
