"""Questions of torch about a storage that never reach the guard of evicted memory, or reach it where nobody catches.

Pickling for another process takes a storage of size 0 for an empty one and sends no bytes. ``is_shared()`` of a CPU storage
asks for its address in a function that lets no exception through, which ends the process. Both ask for the address first
here, and so raise what every other access to evicted memory raises.
"""

import functools
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import torch
import torch.multiprocessing  # registers the reducers

_Result = TypeVar("_Result")


def _guarded(function: Callable[[torch.UntypedStorage], _Result]) -> Callable[[torch.UntypedStorage], _Result]:
    @functools.wraps(function)
    def guarded(storage: torch.UntypedStorage) -> _Result:
        if storage.device.type == "cpu":
            storage.data_ptr()  # raises where the bytes are away
        return function(storage)

    return guarded


@functools.cache
def install_torch_guards() -> None:
    """Puts the guards in, once a process."""
    reducers: dict[type, Callable[[Any], Any]] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    ForkingPickler.register(torch.UntypedStorage, _guarded(reducers[torch.UntypedStorage]))
    torch.UntypedStorage.is_shared = _guarded(torch.UntypedStorage.is_shared)  # type: ignore[method-assign]
