"""Exceptions. Where the device is out of memory, torch.OutOfMemoryError is raised as everywhere in torch."""


class LowtideError(RuntimeError):
    """A call that makes no sense now, or a driver call that failed. Nothing was changed."""


class HostMemoryError(LowtideError, MemoryError):
    """The machine, or the budget set, does not allow the host memory that an eviction needs. Nothing was changed."""
