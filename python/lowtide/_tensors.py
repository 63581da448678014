"""From what people call a tensor to the plain tensors that own memory."""

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from . import _native


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that own the memory: ``tensor`` itself, or the inner ones of a DTensor, wrapper or sparse tensor."""
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        yield from plain_tensors(local)
        return
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten(tensor)[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):
                yield from plain_tensors(inner)
        return
    if tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def tensors_in(tensors: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a tensor, None, a mapping's values, or an iterable of these.

    Raises:
        TypeError: Something else was found.
    """
    if tensors is None:
        return
    if isinstance(tensors, torch.Tensor):
        yield tensors
    elif isinstance(tensors, Mapping):
        for value in tensors.values():
            yield from tensors_in(value)
    elif isinstance(tensors, (str, bytes)) or not hasattr(tensors, "__iter__"):
        raise TypeError(f"expected a torch.Tensor, None, or an iterable of these, not {type(tensors).__name__}")
    else:
        for value in tensors:
            yield from tensors_in(value)


def find_owners() -> None:
    """Looks through all live Python tensors and tracks each storage in the region its memory lies in.

    For memory that no operator returned: compiled code allocates past the dispatcher, ``untyped_storage().resize_()``
    too.
    """
    # One by one, without keeping the list: it refers to everything alive.
    for candidate in gc.get_objects():
        # type(), not isinstance(): the latter asks __class__, which runs code of proxies.
        if not issubclass(type(candidate), torch.Tensor):
            continue
        try:
            for tensor in plain_tensors(candidate):
                _native.track_where_it_is(tensor)
        except Exception:  # noqa: BLE001, S112 - a half-made or odd subclass must not stop an eviction
            continue
