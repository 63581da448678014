"""Lowtide: a caching allocator for PyTorch whose regions leave the device and come back in place.

    import lowtide, torch

    lowtide.install()                          # before CUDA is used
    state = lowtide.OffloadRegion("adam")
    with state:
        optimizer.step()                       # the state that the first step makes lives in the region
    state.evict()                              # its memory serves others; using its tensors raises
    state.restore()                            # same objects, same addresses, same bytes

All sizes are in bytes.
"""

import sys as _sys

from . import _torch_version  # first: raises ImportError under a torch that this copy was not built for
from ._build_info import LOWTIDE_VERSION as __version__
from ._errors import HostMemoryError, LowtideError
from ._install import allocator, cmake_prefix_path, include_path, install, installed, library_path
from ._pool import CPUOffloadPool
from ._region import OffloadRegion, no_region, region, regions
from ._stats import host_budget, memory_stats, set_host_budget, trim_host

__all__ = [
    "CPUOffloadPool",
    "HostMemoryError",
    "LowtideError",
    "OffloadRegion",
    "__version__",
    "allocator",
    "cmake_prefix_path",
    "host_budget",
    "include_path",
    "install",
    "installed",
    "library_path",
    "memory_stats",
    "no_region",
    "region",
    "regions",
    "set_host_budget",
    "trim_host",
]

del _torch_version

# Where this interpreter was started to install Lowtide after torch, and it was this import that imported torch.
if "_lowtide_startup" in _sys.modules:
    _sys.modules["_lowtide_startup"].lowtide_imported()
