"""What install() does in a fresh process. Argument: the case."""

import sys

import lowtide
import torch
from lowtide import _native

case = sys.argv[1]
cuda = _native.cuda_device_count() > 0


def refused(call, *words):
    try:
        call()
    except lowtide.LowtideError as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError("no error")


if case == "import changes nothing":
    assert lowtide.installed() is None
    assert torch.cuda.get_allocator_backend() == "native"
    assert not torch.cuda.is_initialized()
    with torch.inference_mode():
        assert torch.ones(3).sum().item() == 3
elif case == "auto":
    lowtide.install()
    assert lowtide.installed() == ("cuda" if cuda else "host")
    lowtide.install()
    lowtide.install(lowtide.installed())
    assert lowtide.installed() == ("cuda" if cuda else "host")
elif case == "host":
    lowtide.install("host", host_memory=256 << 20, host_budget=64 << 20)
    assert lowtide.installed() == "host"
    assert lowtide.host_budget() == 64 << 20
    assert _native.device_memory(0)[1] == 256 << 20
    lowtide.install("host")
    lowtide.install("auto")
    refused(lambda: lowtide.install("cuda"), "host device")
    refused(lambda: lowtide.allocator().allocator(), "host device")
    with lowtide.OffloadRegion("r") as region:
        tensor = torch.ones(10)
    region.evict()
    region.restore()
    assert tensor.sum().item() == 10
elif case == "cuda where there is none":
    assert not cuda
    refused(lambda: lowtide.install("cuda"), "no CUDA device", "driver")
    assert lowtide.installed() is None
    lowtide.install("host")
    assert lowtide.installed() == "host"
elif case == "cuda":
    lowtide.install("cuda")
    assert lowtide.installed() == "cuda"
    lowtide.install("cuda")
    refused(lambda: lowtide.install("host"), "CUDA")
    assert torch.ones(3, device="cuda").sum().item() == 3
    lowtide.install()
elif case == "change_current_allocator":
    torch.cuda.memory.change_current_allocator(lowtide.allocator())
    assert lowtide.installed() == "cuda"
    with lowtide.OffloadRegion("r") as region:
        tensor = torch.ones(10, device="cuda")
    assert torch.cuda.memory_allocated() > 0
    region.evict()
    region.restore()
    assert tensor.sum().item() == 10
elif case == "after CUDA":
    torch.ones(1, device="cuda")
    refused(lambda: lowtide.install("cuda"), "in use already", "before")
    refused(lambda: lowtide.allocator().allocator(), "in use already")
    assert lowtide.installed() is None
    assert torch.ones(3, device="cuda").sum().item() == 3
elif case == "another allocator":
    # Without a GPU, "after CUDA started" can be played no further: torch's allocator is not the untouched native.
    import ctypes

    path = lowtide.library_path()
    ctypes.CDLL(path)
    torch.cuda.memory.change_current_allocator(
        torch.cuda.memory.CUDAPluggableAllocator(path, "lowtide_malloc", "lowtide_free")
    )
    refused(lambda: lowtide.install("cuda"), "pluggable" if cuda else "CUDA")
else:
    raise SystemExit(f"unknown case {case}")
