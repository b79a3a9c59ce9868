"""Checkpoints: what the files hold and what is wrong with them, told from headers, before anything is loaded."""

from vramfit.checkpoints.entry import TensorEntry
from vramfit.checkpoints.files import CheckpointFiles, find_checkpoint
from vramfit.checkpoints.inspection import Inspection, ShapeMismatch, inspect_checkpoint
from vramfit.checkpoints.reading import read_entries

__all__ = [
    "CheckpointFiles",
    "Inspection",
    "ShapeMismatch",
    "TensorEntry",
    "find_checkpoint",
    "inspect_checkpoint",
    "read_entries",
]
