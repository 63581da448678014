"""Regions: memory that can leave the device and come back at the same address."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Literal

import torch

from . import _native, _tensors
from ._arguments import checked_name
from ._errors import LowtideError
from ._install import require_device


class OffloadRegion:
    """A named region: in a ``with`` block it takes what this thread allocates; as an object it moves it.

    A name is a region, process-wide and on all devices: objects made with the same name are handles to the same one.
    The region lives while a handle or one of its tensors does. Evicted and without handles it keeps its bytes;
    ``OffloadRegion(name)`` or :func:`lowtide.region` finds it again.

    The ``with`` block may be nested (the innermost region wins), entered again, and entered on several threads at once;
    it concerns only the thread that entered it. Autograd's worker threads are such other threads: what backward
    allocates there is outside. On the host device backward runs on the calling thread, so gradients made inside the
    block are in the region. A generator or coroutine that is suspended inside the block leaves the region open for
    whatever the thread runs next.

    Everything allocated in the block belongs to the region until it is freed, wherever it is freed.

    Safe from any thread. Evict and restore of one region exclude each other; the GIL is released while they run. Nobody
    may use the region's tensors while they run; a tensor that another thread is making in the region then is one of them.
    """

    __slots__ = ("_native",)

    def __init__(self, name: str) -> None:
        """A handle to the region called ``name``, which is made if there is none.

        Raises:
            LowtideError: The name is empty, or the process is a forked child.
            TypeError, ValueError: The name is not a string, or not one that UTF-8 can hold.
        """
        self._native = _native.Region(checked_name(name))

    @classmethod
    def _of(cls, native: "_native.Region") -> "OffloadRegion":
        region = cls.__new__(cls)
        region._native = native
        return region

    def __enter__(self) -> "OffloadRegion":
        """Opens the region for this thread.

        Raises:
            LowtideError: Lowtide serves no device in this process, or the process is a forked child.
        """
        require_device()
        self._native.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._native.leave()

    @property
    def name(self) -> str:
        """The region's name."""
        return self._native.name

    @property
    def state(self) -> str:
        """``"resident"``, ``"evicting"``, ``"evicted"`` or ``"restoring"``."""
        return self._native.state

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the region's live tensors, wherever they are; each rounded up as it is allocated."""
        return self._native.allocated_bytes

    @property
    def resident_bytes(self) -> int:
        """Of :attr:`allocated_bytes`, those on the device."""
        return self._native.resident_bytes

    @property
    def evicted_bytes(self) -> int:
        """Of :attr:`allocated_bytes`, those on the host."""
        return self._native.evicted_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that hold :attr:`evicted_bytes`."""
        return self._native.pinned_bytes

    def track(self, tensor: torch.Tensor) -> None:
        """Adds a tensor to those that are guarded while the region is evicted.

        Needed only where Lowtide cannot see that the tensor exists: no operator returned it while the ``with`` block
        was open, and it is no live Python object either (those are found when the region is evicted). Idempotent. A
        DTensor, another wrapper subclass and a sparse tensor stand for their inner tensors. Empty tensors are ignored.

        Raises:
            LowtideError: The tensor's memory is not in this region.
            TypeError: Not a tensor.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected a torch.Tensor, not {type(tensor).__name__}")
        for plain in _tensors.plain_tensors(tensor):
            _native.track(self._native, plain)

    def evict(self, *, untracked: Literal["refuse", "unmap"] = "refuse") -> int:
        """Copies the bytes to pinned host memory; the device memory serves this process's next allocations.

        Returns when that is done. The copies start after all work queued so far on the caller's current streams, on the
        streams the tensors were allocated on and on those named to ``record_stream``. Until :meth:`restore` each
        tensor's storage reports 0 bytes and every access to its data raises RuntimeError naming the region; its
        shape and strides can still be looked at. Raw addresses taken before (``data_ptr()``, ``numpy()``, DLPack)
        cannot be guarded and must not be used. Evicted already: no effect.

        Args:
            untracked: What to do if live memory of the region belongs to no tensor that is known or found: ``"refuse"``
                raises, ``"unmap"`` evicts it too; the caller then knows that nothing uses it before the restore.

        Returns:
            The bytes that left the device in this call.

        Raises:
            LowtideError: A CUDA graph is being captured; a tensor is shared with another process; untracked memory. The
                region is as before.
            HostMemoryError: There is not enough host memory, or the budget forbids it. The region is as before.
            ValueError: ``untracked`` is neither word.
        """
        if untracked not in ("refuse", "unmap"):
            raise ValueError(f'untracked is {untracked!r}; choose "refuse" or "unmap"')
        native = self._native
        unmap = untracked == "unmap"
        if unmap and native.untracked_blocks():
            _tensors.find_owners()
        before = native.evicted_bytes
        try:
            native.evict(unmap)
        except LowtideError:
            # A search through all live objects takes long, so it waits until a block is found that no known tensor uses.
            if unmap or not native.untracked_blocks():
                raise
            _tensors.find_owners()
            native.evict(unmap)
        return max(0, native.evicted_bytes - before)

    def restore(self) -> None:
        """Maps memory at the same addresses and copies the bytes back; the tensors are then as they were.

        Returns when that is done; any stream may use the tensors at once. Not evicted: no effect.

        Raises:
            torch.OutOfMemoryError: The device has not enough memory. The region is still evicted, nothing is lost; try
                again after freeing some.
            LowtideError: A CUDA graph is being captured, or the driver failed. The region is still evicted, nothing is
                lost.
        """
        self._native.restore()

    def __repr__(self) -> str:
        return f"OffloadRegion({self.name!r}, {self.state}, {self.allocated_bytes} bytes)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OffloadRegion) and self._native.id == other._native.id

    def __hash__(self) -> int:
        return hash(self._native.id)


def region(name: str) -> OffloadRegion:
    """The region called ``name``, which must exist.

    Raises:
        KeyError: There is none; the message lists those there are.
    """
    for native in _native.Region.all():
        if native.name == name:
            return OffloadRegion._of(native)
    names = ", ".join(repr(native.name) for native in _native.Region.all()) or "none"
    raise KeyError(f"there is no offload region {name!r}; there are: {names}")


def regions() -> list[OffloadRegion]:
    """All regions that exist, in order of creation."""
    return [OffloadRegion._of(native) for native in _native.Region.all()]


@contextmanager
def no_region() -> Iterator[None]:
    """Inside the block this thread's allocations go to no region, whatever region is open around it."""
    _native.enter_no_region()
    try:
        yield
    finally:
        _native.leave_no_region()
