"""Loads `scripts/make_broken_checkpoints.py`, which is no package, for the tests of this room."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_broken_checkpoints.py"


def load_script(path: Path = SCRIPT) -> ModuleType:
    """The script as a module; the same one each time."""
    if path.stem in sys.modules:
        return sys.modules[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
