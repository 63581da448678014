"""What bad input gets: a clear error, and nothing lost."""

import lowtide
import pytest
import torch
from lowtide import _native
from lowtide_testing import Keep, assert_away, evicted, fill, on_host, run_script

MIB = 1 << 20


@pytest.fixture
def budget():
    before = lowtide.host_budget()
    yield lowtide.set_host_budget
    lowtide.set_host_budget(before)


@pytest.fixture
def little_memory(device):
    """Little enough device memory that a test can use it up."""
    _native.trim(0)
    if device.type == "cuda":
        stats = lowtide.memory_stats()
        limit = stats["reserved_bytes"] + 4096 * MIB  # fill() takes up to 32 bytes a byte
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    yield
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)


def use_up(device, keep_free=0):
    """Tensors that take all memory the device still has."""
    hog = []
    with lowtide.OffloadRegion("hog"):
        for size in (64 * MIB, 8 * MIB, 2 * MIB):
            try:
                while True:
                    hog.append(torch.empty(size, dtype=torch.uint8, device=device))
            except torch.OutOfMemoryError:
                continue
    return hog


@pytest.mark.parametrize("named", [lowtide.OffloadRegion, lowtide.CPUOffloadPool])
def test_bad_names(named):
    with pytest.raises(lowtide.LowtideError, match="name"):
        named("")
    with pytest.raises(TypeError, match="name is a string, not int"):
        named(3)
    with pytest.raises(TypeError, match="name is a string, not list"):
        named([torch.ones(3)])


def test_names():
    assert lowtide.OffloadRegion("Überraschung 🌊").name == "Überraschung 🌊"


def test_unknown_region(region, device):
    with pytest.raises(KeyError, match=f"no offload region 'nowhere'; there are: .*'{region.name}'"):
        lowtide.region("nowhere")


def test_sizes_must_not_be_negative():
    for call in (
        lambda: lowtide.set_host_budget(-1),
        lambda: lowtide.install(host_budget=-1),
        lambda: lowtide.install(host_memory=-1),
    ):
        with pytest.raises(ValueError, match="negative"):
            call()


def test_sizes_are_whole_numbers():
    for call in (
        lambda: lowtide.set_host_budget(None),
        lambda: lowtide.set_host_budget("8 GiB"),
        lambda: lowtide.install(host_budget=1e9),
        lambda: lowtide.install(host_memory="1"),
    ):
        with pytest.raises(TypeError, match="whole number of bytes"):
            call()


def test_names_are_text():
    for name in ("\ud800", "a\0b"):
        for call in (lowtide.OffloadRegion, lowtide.CPUOffloadPool):
            with pytest.raises(ValueError, match="name"):
                call(name)


def test_arguments_that_name_no_device():
    for wrong in ("meta", 1 << 63, -1):
        with pytest.raises(lowtide.LowtideError, match="device"):
            lowtide.memory_stats(wrong)
    with pytest.raises(TypeError, match="auto"):
        lowtide.install(None)


def test_a_host_device_that_no_machine_has():
    run_script("impossible_host.py")


def test_unknown_device():
    with pytest.raises(lowtide.LowtideError, match="auto"):
        lowtide.install("tpu")
    with pytest.raises(lowtide.LowtideError):
        lowtide.memory_stats(99)


def test_a_budget_of_zero(region, device, budget):
    lowtide.trim_host()
    with region:
        tensor = fill(torch.empty(MIB, dtype=torch.uint8, device=device))
    keep = Keep(tensor)
    budget(0)
    assert lowtide.host_budget() == 0
    with pytest.raises(lowtide.HostMemoryError) as caught:
        region.evict()
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, RuntimeError)
    assert region.state == "resident"
    keep.check()
    pool = lowtide.CPUOffloadPool()
    pool.track(tensor)
    with pytest.raises(MemoryError):
        pool.offload()
    assert not pool.offloaded
    keep.check()
    budget(1 << 30)
    with evicted(region):
        assert_away(tensor)
    keep.check()


def test_too_little_host_memory_names_sizes(region, device, budget):
    lowtide.trim_host()
    with region:
        tensors = [fill(torch.empty(4 * MIB, dtype=torch.uint8, device=device), seed=i) for i in range(4)]
    keeps = [Keep(tensor) for tensor in tensors]
    budget(6 * MIB)
    with pytest.raises(lowtide.HostMemoryError) as caught:
        region.evict()
    assert any(character.isdigit() for character in str(caught.value))
    assert region.state == "resident"
    assert region.evicted_bytes == 0
    for keep in keeps:
        keep.check()


def test_out_of_device_memory_at_restore_loses_nothing(region, device, little_memory):
    with region:
        tensors = [fill(torch.empty(32 * MIB, dtype=torch.uint8, device=device), seed=i) for i in range(4)]
    keeps = [Keep(tensor) for tensor in tensors]
    region.evict()
    hog = use_up(device)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            region.restore()
        assert region.state == "evicted"
        assert_away(*tensors)
        with pytest.raises(RuntimeError, match=region.name):
            tensors[0].add_(1)  # what needs memory of its own would fail for want of it
    hog.clear()
    region.restore()
    for keep in keeps:
        keep.check()


def test_out_of_device_memory_at_reload_loses_nothing(device, little_memory):
    pool = lowtide.CPUOffloadPool()
    tensor = fill(torch.empty(64 * MIB, dtype=torch.uint8, device=device))
    pool.track(tensor)
    pool.offload()
    pool.reload()
    keep = Keep(tensor)
    pool.offload()
    hog = use_up(device)
    with pytest.raises(torch.OutOfMemoryError):
        pool.reload()
    assert pool.offloaded
    assert_away(tensor)
    hog.clear()
    pool.reload()
    keep.check()


def test_out_of_memory_in_a_region_is_torchs(region, device, little_memory):
    with region:
        small = torch.ones(10, device=device)
        for _ in range(20):
            with pytest.raises(torch.OutOfMemoryError) as caught:
                torch.empty(1 << 50, dtype=torch.uint8, device=device)
        after = torch.ones(10, device=device)
    assert isinstance(caught.value, RuntimeError)
    assert small.sum().item() == after.sum().item() == 10


def test_freed_memory_of_a_region_serves_larger_requests(region, device, little_memory):
    """No fragmentation into pieces that nobody can use: physical memory is pages, not address ranges."""
    with region:
        first = torch.ones(300 * MIB, dtype=torch.uint8, device=device)
        del first
        second = torch.ones(400 * MIB, dtype=torch.uint8, device=device)
    assert int(second[-1]) == 1


def test_rejected_words(region):
    with pytest.raises(ValueError, match="unmap"):
        region.evict(untracked="drop")
    with pytest.raises(TypeError):
        region.evict("unmap")


def test_regions_without_a_device_are_refused():
    run_script("no_install.py")


@pytest.mark.cuda
def test_evict_during_a_capture(region, device):
    with region:
        tensor = torch.ones(1000, device=device)
    keep = Keep(tensor)
    pool = lowtide.CPUOffloadPool()
    outside = torch.ones(1000, device=device)
    pool.track(outside)
    graph = torch.cuda.CUDAGraph()
    result = torch.zeros(1000, device=device)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result.add_(tensor)
        with pytest.raises(lowtide.LowtideError, match="captur"):
            region.evict()
        with pytest.raises(lowtide.LowtideError, match="captur"):
            pool.offload()
        result.add_(tensor)
    graph.replay()
    torch.cuda.synchronize()
    assert result.sum().item() == 2000
    keep.check()
    with evicted(region):
        assert_away(tensor)
    keep.check()
    graph.replay()
    assert result.sum().item() == 4000


@pytest.mark.cuda
def test_memory_shared_by_ipc_is_pinned(region, device):
    with region:
        tensor = torch.ones(1000, device=device)
    try:
        tensor.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        pytest.skip(f"CUDA IPC of this memory: {error}")
    with pytest.raises(lowtide.LowtideError, match=region.name):
        region.evict()
    assert region.state == "resident"
    assert tensor.sum().item() == 1000


@pytest.mark.skipif(
    "not __import__('lowtide_testing').on_host()", reason="on CUDA sharing means CUDA IPC, tested above"
)
def test_sharing_an_evicted_tensor_raises(region, device):
    with region:
        tensor = torch.ones(1000, device=device)
    with evicted(region):
        with pytest.raises(RuntimeError, match=region.name):
            tensor.share_memory_()
    tensor.share_memory_()
    assert tensor.is_shared()
    assert region.allocated_bytes == 0
    assert tensor.sum().item() == 1000
    assert on_host()
