"""Checkpoints: what the files hold and what is wrong with them, told from headers, before anything is loaded."""

from vramfit.checkpoints.files import CheckpointFiles, cached_snapshot, find_checkpoint
from vramfit.checkpoints.inspection import Inspection, inspect_checkpoint, inspect_config
from vramfit.checkpoints.matching import ShapeMismatch
from vramfit.checkpoints.reading import read_entries
from vramfit.checkpoints.safetensors_file import TensorEntry

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
