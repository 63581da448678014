"""Putting Lowtide into torch, and where its files are."""

import os
from typing import Any

import torch

from . import _native
from ._arguments import checked_bytes
from ._errors import LowtideError
from ._torch_guards import install_torch_guards

_PACKAGE = os.path.dirname(os.path.abspath(__file__))

#: For CMAKE_PREFIX_PATH, so that ``find_package(Lowtide)`` of a LibTorch program finds this copy.
cmake_prefix_path: str = os.path.join(_PACKAGE, "share", "cmake")

#: Folder of the C++ headers: ``#include <lowtide/lowtide.h>``.
include_path: str = os.path.join(_PACKAGE, "include")


def install(device: str = "auto", host_memory: int | None = None, host_budget: int | None = None) -> None:
    """Makes Lowtide torch's allocator in this process. Calling it again for the same device does nothing.

    Call it right after importing torch: torch accepts another CUDA allocator only before CUDA is first used.

    Args:
        device: ``"cuda"``: CUDA memory. ``"host"``: CPU tensors made inside a region live in pages that can leave;
            every other CPU tensor is untouched. ``"auto"``: CUDA where a driver and a GPU are, else the host device.
        host_memory: Size in bytes of the host device's memory; allocations in regions beyond it raise. Default: half of
            this computer's memory. Without effect for CUDA.
        host_budget: Most bytes of host memory that evicted regions may hold, see :func:`lowtide.set_host_budget`.

    Raises:
        LowtideError: CUDA is in use already, another allocator took torch's place, there is no such device (the message
            says why), or Lowtide serves another kind of device in this process. Nothing was changed then.
        TypeError, ValueError: A size is no whole number of bytes, or negative.
    """
    if not isinstance(device, str):
        raise TypeError(f'device is "auto", "cuda" or "host", not {type(device).__name__}')
    if host_memory is not None:
        checked_bytes("host_memory", host_memory)
    if host_budget is not None:
        checked_bytes("host_budget", host_budget)
    _native.install(device, host_memory or 0)
    install_torch_guards()
    if host_budget is not None:
        _native.set_host_budget(host_budget)


def installed() -> str | None:
    """``"cuda"`` or ``"host"`` where Lowtide is torch's allocator for that device, else None.

    None too where torch was given :func:`library_path` as a plain plug-in: regions work then, but torch's statistics do
    not.
    """
    return _native.installed_device() or None


class _CudaAllocator:
    """What ``torch.cuda.memory.change_current_allocator`` wants: an object with a method ``allocator``."""

    def allocator(self) -> Any:
        """torch's handle of Lowtide's CUDA allocator.

        Raises:
            LowtideError: As :func:`lowtide.install` with ``device="cuda"``.
        """
        return _native.cuda_allocator()


def allocator() -> _CudaAllocator:
    """Lowtide's CUDA allocator for ``torch.cuda.memory.change_current_allocator``.

    ``change_current_allocator(lowtide.allocator())`` does what ``lowtide.install("cuda")`` does.
    """
    return _CudaAllocator()


def library_path() -> str:
    """Path of the library for ``torch.cuda.memory.CUDAPluggableAllocator(path, "lowtide_malloc", "lowtide_free")``."""
    return os.path.join(_PACKAGE, "liblowtide.so")


def require_device() -> None:
    """Raises unless this process's tensors can be in a region.

    A region that catches nothing would only look as if it worked.

    Raises:
        LowtideError: Neither was Lowtide installed nor is a plug-in allocator torch's; or this process is a forked
            child.
    """
    if _native.in_forked_child():
        raise LowtideError(
            'the process was forked: device memory belongs to the parent; start workers with the "spawn" method'
        )
    if _native.device_kind():
        return
    # A plain plug-in chooses its device at torch's first CUDA allocation; until then only torch knows of it.
    if torch.cuda.get_allocator_backend() == "pluggable":
        return
    raise LowtideError("no memory of this process is Lowtide's yet; call lowtide.install() before tensors are made")
