"""Whether CUDA's driver is on this machine: without it no torch finds a GPU."""

import ctypes
import sys

_LIBRARIES = {"linux": "libcuda.so.1", "win32": "nvcuda.dll"}


def has_driver() -> bool:
    """Whether the driver's library can be loaded; CUDA is not started."""
    library = _LIBRARIES.get(sys.platform)
    if library is None:
        return False
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
