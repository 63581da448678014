"""Moving a set of tensors out and back, whoever made them."""

import contextlib
import itertools
import threading
from collections.abc import Iterable
from typing import Any

import torch

from . import _native, _tensors
from ._arguments import checked_name
from ._errors import LowtideError
from ._install import require_device
from ._region import OffloadRegion, regions

_numbers = itertools.count()


class CPUOffloadPool:
    """Tensors that leave the device together and come back together.

    Tensors made inside an :class:`lowtide.OffloadRegion` leave with their region, which moves as a whole. Tensors made
    elsewhere are moved into a region of this pool at the first :meth:`offload` after they were tracked: once, device to
    device, the same tensor objects at another address. From then on their addresses stay. Whoever recorded the old
    address before that (a captured CUDA graph, a raw pointer) must record it again, so offload once before capturing.

    The unit is the storage: views, overlapping, non-contiguous and differently typed tensors of one storage count once,
    and all of them are away and back together. The pool keeps no tensor alive. Tensors may be on several devices.

    Safe from any thread; calls on one pool exclude each other.
    """

    def __init__(self, name: str | None = None) -> None:
        """An empty pool.

        Args:
            name: Name of the pool's region, used in errors and by :func:`lowtide.region`. Pools of the same name share
                a region, so they leave together. Default: a name of its own.

        Raises:
            LowtideError: The name is empty.
            TypeError: The name is not a string. Tensors are given to :meth:`track`.
        """
        self._name = checked_name(name) if name is not None else f"CPUOffloadPool-{next(_numbers)}"
        self._region: OffloadRegion | None = None
        self._tracked: dict[int, _native.StorageHandle] = {}
        self._evicted: list[OffloadRegion] = []
        self._offloaded = False
        self._announced = False
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """Name of the pool's region."""
        return self._name

    @property
    def offloaded(self) -> bool:
        """Whether the pool's tensors are away."""
        return self._offloaded

    @property
    def tracked_bytes(self) -> int:
        """Bytes of the storages tracked that are alive, wherever they are; a storage counts once."""
        with self._lock:
            return sum(handle.nbytes for handle in self._living())

    def track(self, tensors: torch.Tensor | Iterable[Any] | None) -> None:
        """Adds tensors to the pool.

        Adding one again has no effect. A tensor added while the pool is away leaves next time.

        Accepts a tensor, None, a mapping (its values), or any iterable of these, nested as one likes. A DTensor,
        another wrapper subclass and a sparse tensor stand for their inner tensors. Skipped without an error: None,
        empty tensors, tensors on the meta device, and tensors on another kind of device than Lowtide serves (CPU
        tensors beside CUDA, such as Adam's ``step``).

        A tensor that is given another storage later (``p.data = ...``) must be tracked again.

        Raises:
            TypeError: Something is neither a tensor nor iterable. Nothing was added.
            LowtideError: Lowtide serves no device in this process.
        """
        require_device()
        kind = {"cuda": "cuda", "host": "cpu"}.get(_native.device_kind() or "cuda")
        found = [plain for tensor in _tensors.tensors_in(tensors) for plain in _tensors.plain_tensors(tensor)]
        with self._lock:
            for tensor in found:
                if tensor.device.type != kind:
                    continue
                handle = _native.storage_handle(tensor)
                if handle is not None and handle.nbytes > 0:
                    self._tracked.setdefault(handle.key, handle)

    def offload(self) -> int:
        """Moves every tracked tensor to pinned host memory.

        Until :meth:`reload` its storage reports 0 bytes and using it raises RuntimeError naming the pool's region.

        Blocks until done, ordered after the work queued so far on the current streams. See
        :meth:`lowtide.OffloadRegion.evict`. The first call that finds tensors logs one line with tensors, groups
        (regions per device) and megabytes, at level info (``LOWTIDE_LOG=info``).

        Returns:
            The bytes that left the device.

        Raises:
            RuntimeError: The pool is away already; a tensor cannot be moved (it is from_blob memory, shared with
                another process, or in a CUDA graph's private pool); or :meth:`lowtide.OffloadRegion.evict` refused.
                Every tensor is usable then.
            HostMemoryError: There is not enough host memory, or the budget forbids it. Every tensor is usable then.
            torch.OutOfMemoryError: No room to move a tensor into the pool's region. Every tensor is usable then.
        """
        with self._lock:
            if self._offloaded:
                raise LowtideError(f"pool '{self._name}' is offloaded already; call reload() first")
            require_device()
            storages = self._living()
            self._adopt([handle for handle in storages if handle.nbytes > 0 and handle.region_id is None])
            ids = {handle.region_id for handle in storages if handle.nbytes > 0}
            leaving = [candidate for candidate in regions() if candidate._native.id in ids]
            for candidate in leaving:
                candidate._native.take_changed_storages()  # of earlier evictions, by whomever
            moved = self._evict(leaving)
            self._announce(storages, leaving)
            return moved

    def reload(self) -> None:
        """Brings every tensor back: same objects, same addresses, same bytes. Blocks until done.

        Raises:
            RuntimeError: The pool is not away; or somebody gave tensors other memory meanwhile (resized a storage):
                those are left as they were found, all others are back.
            torch.OutOfMemoryError: The device has not enough memory. What did not fit is still away, nothing is lost;
                call again after freeing some.
        """
        with self._lock:
            if not self._offloaded:
                raise LowtideError(f"pool '{self._name}' is not offloaded; call offload() first")
            changed = 0
            while self._evicted:
                # In place: after an error the regions that are not back yet are those that the next call takes.
                self._evicted[-1].restore()
                changed += self._evicted.pop()._native.take_changed_storages()
            self._offloaded = False
            if changed:
                raise LowtideError(
                    f"{changed} storage(s) of pool '{self._name}' were given other memory while they were offloaded "
                    "(resized, for example); they were left as found, and their offloaded bytes are lost. All other "
                    "tensors are back"
                )

    def __repr__(self) -> str:
        where = "offloaded" if self._offloaded else "resident"
        return f"CPUOffloadPool({self._name!r}, {where}, {len(self._tracked)} storages)"

    def _living(self) -> list["_native.StorageHandle"]:
        """Handles of storages that are alive; forgets the others."""
        self._tracked = {key: handle for key, handle in self._tracked.items() if handle.alive}
        return list(self._tracked.values())

    def _adopt(self, storages: list["_native.StorageHandle"]) -> None:
        """Moves storages into the pool's region; all or, if one may not be moved, none."""
        if not storages:
            return
        for handle in storages:
            if obstacle := handle.adoption_obstacle():
                raise LowtideError(f"cannot offload a tensor of {handle.nbytes} bytes on {handle.device}: {obstacle}")
        if self._region is None:
            self._region = OffloadRegion(self._name)
            self._region._native.set_remedy("call reload() of its CPUOffloadPool, or region.restore(), before using it")
        for handle in storages:
            handle.adopt_into(self._region._native)

    def _evict(self, leaving: list[OffloadRegion]) -> int:
        """Evicts the regions in turn; if one refuses, brings back those that went before it."""
        were_here = [candidate for candidate in leaving if candidate.resident_bytes > 0]
        # Before anything leaves: whatever interrupts this, and whenever, reload() finds all that is away.
        self._evicted = list(leaving)
        self._offloaded = True
        try:
            return sum(candidate.evict() for candidate in leaving)
        except BaseException:
            self._evicted = were_here
            with contextlib.suppress(RuntimeError):  # what cannot come back now is reload()'s to bring
                while self._evicted:
                    self._evicted[-1].restore()
                    self._evicted.pop()
                self._offloaded = False
            raise

    def _announce(self, storages: list["_native.StorageHandle"], leaving: list[OffloadRegion]) -> None:
        if self._announced or not storages:
            return
        self._announced = True
        total = sum(handle.nbytes for handle in storages)
        groups = len({(handle.region_id, handle.device) for handle in storages})
        _native.log_info(
            f"pool '{self._name}': offloading {len(storages)} tensors in {groups} groups, {total / 1e6:.1f} MB "
            f"(regions: {', '.join(candidate.name for candidate in leaving)})"
        )
