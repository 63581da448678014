"""What several test modules use."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import lowtide
import torch

SUBPROCESS = Path(__file__).parent / "subprocess"


def storage_bytes(tensor):
    """The bytes of the tensor's whole storage, copied to ordinary CPU memory."""
    with lowtide.no_region():
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return flat.cpu().clone()


def fill(tensor, seed=0):
    """Gives every byte of the tensor's storage a value that depends on its position."""
    with lowtide.no_region(), torch.no_grad():
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        position = torch.arange(flat.numel(), device=storage.device)
        flat.copy_((position * 31 + (position >> 8) * 7 + seed) % 251)
    return tensor


class Keep:
    """What must not change about a tensor by being evicted and restored."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.before = self._look()
        self.bytes = storage_bytes(tensor)

    def _look(self):
        t = self.tensor
        return {
            "id": id(t),
            "data_ptr": t.data_ptr(),
            "storage data_ptr": t.untyped_storage().data_ptr(),
            "storage nbytes": t.untyped_storage().nbytes(),
            "shape": tuple(t.shape),
            "stride": tuple(t.stride()),
            "storage_offset": t.storage_offset(),
            "dtype": t.dtype,
            "device": t.device,
            "requires_grad": t.requires_grad,
            "version": 0 if t.is_inference() else t._version,
        }

    def check(self):
        assert self._look() == self.before
        assert torch.equal(storage_bytes(self.tensor), self.bytes), "bytes changed"


def assert_away(*tensors):
    for tensor in tensors:
        assert tensor.untyped_storage().nbytes() == 0


@contextlib.contextmanager
def evicted(region):
    region.evict()
    assert region.state == "evicted"
    try:
        yield
    finally:
        region.restore()


def raw_storage(region, size, device):
    """Memory of the region that belongs to no tensor: torch makes it below its operators."""
    storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
    with region:
        storage.resize_(size)
    return storage


def on_host():
    return lowtide.installed() == "host"


def run_script(name, *arguments, timeout=60, env=None, check=True):
    """Runs tests/python/subprocess/NAME in a fresh interpreter on this run's device; returns the finished process."""
    result = subprocess.run(
        [sys.executable, str(SUBPROCESS / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "LOWTIDE_TEST_DEVICE": lowtide.installed() or "auto", **(env or {})},
    )
    if check:
        assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
        assert result.stderr == ""
    return result
