"""Figures of memory, and the host memory that evicted regions hold."""

import torch

from . import _native
from ._arguments import checked_bytes
from ._errors import LowtideError
from ._install import require_device


def memory_stats(device: torch.device | int | str | None = None) -> dict[str, int | float]:
    """What Lowtide holds on a device and what moving regions has cost so far.

    Sizes are in bytes; keys that end in ``_peak`` are the most since the start or the last
    ``torch.cuda.reset_peak_memory_stats()``.

    ======================  =====================================================================================
    allocations             blocks handed out and not freed, evicted ones too
    allocated_bytes         their bytes on the device: what is evicted is not counted
    requested_bytes         what was asked for, before rounding; evicted blocks counted
    active_bytes            allocated, plus blocks freed whose streams are not past them
    reserved_bytes          device memory held: blocks, cached free memory, free pages
    evicted_bytes           live bytes that are on the host
    free_page_bytes         of the reserved bytes, pages ready for any use
    pages                   driver allocations alive
    page_creations          driver allocations made
    page_releases           driver allocations given back
    metadata_bytes          host memory of the allocator's own bookkeeping: at most 0.5 % of what it manages
    alloc_retries           allocations that needed memory to be reclaimed first
    ooms                    allocations that failed
    pinned_bytes            host memory held: in use and kept for the next eviction
    pinned_leased_bytes     of it, what holds evicted bytes now
    evictions, restores     calls that moved something
    copies                  driver calls that copied
    evicted_bytes_total     bytes copied out in all
    restored_bytes_total    bytes copied back in all
    evict_seconds           host time spent in evict
    restore_seconds         host time spent in restore
    host_allocations        times host memory was mapped and registered
    ======================  =====================================================================================

    Args:
        device: Index or CUDA device; None: the current CUDA device, or the host device.

    Raises:
        LowtideError: Lowtide serves no such device.
    """
    require_device()
    index = _device_index(device)
    return {**_native.allocator_stats(index), **_native.pool_stats(index)}


def _device_index(device: torch.device | int | str | None) -> int:
    kind = _native.device_kind() or "cuda"
    if isinstance(device, int):
        if not 0 <= device < 1 << 31:
            raise LowtideError(f"there is no device {device}")
        return device
    if device is not None:
        named = torch.device(device)
        if named.type != {"cuda": "cuda", "host": "cpu"}[kind]:
            raise LowtideError(f"Lowtide serves the {kind} device in this process, not '{named.type}'")
        if named.index is not None:
            return named.index
    return torch.cuda.current_device() if _native.device_kind() == "cuda" else 0


def trim_host() -> int:
    """Gives host memory that holds no evicted bytes back to the system.

    Waits for running kernels of the devices, because unregistering pinned memory does.

    Returns:
        Bytes given back.
    """
    return _native.trim_host()


def set_host_budget(budget: int) -> None:
    """Sets the most bytes of host memory that evicted regions may hold in this process; memory held already stays.

    Default: 80 % of the memory that this machine, or this process's memory cgroup, has. An eviction beyond it raises
    HostMemoryError and changes nothing.

    Raises:
        TypeError, ValueError: The budget is no whole number of bytes, or negative.
    """
    _native.set_host_budget(checked_bytes("budget", budget))


def host_budget() -> int:
    """The budget in bytes that :func:`set_host_budget` sets."""
    return _native.host_budget()
