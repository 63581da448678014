"""One device per test run: LOWTIDE_TEST_DEVICE=cuda|host, by default CUDA where there is one."""

import gc
import itertools
import os

import lowtide
import pytest
import torch
from lowtide import _native

# So little that running out of it is quick to reach, and no test needs more at once.
HOST_DEVICE_MEMORY = 768 << 20

_numbers = itertools.count()


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a CUDA device")
    # On two cores OpenMP's threads wait for each other a thousand times longer than these small tensors take.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lowtide.install(os.environ.get("LOWTIDE_TEST_DEVICE", "auto"), host_memory=HOST_DEVICE_MEMORY)


def pytest_report_header(config):
    return f"lowtide {lowtide.__version__} on {lowtide.installed()}, torch {torch.__version__}"


def pytest_collection_modifyitems(config, items):
    if lowtide.installed() == "cuda":
        return
    skip = pytest.mark.skip(
        reason=f"needs a CUDA device: {_native.cuda_unavailable_reason() or 'the host device was chosen'}"
    )
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device():
    """Where the tensors of regions are."""
    return torch.device("cuda", 0) if lowtide.installed() == "cuda" else torch.device("cpu")


@pytest.fixture
def region():
    """A region of its own for the test."""
    region = lowtide.OffloadRegion(f"test-{next(_numbers)}")
    yield region
    region.restore()


@pytest.fixture
def other_region():
    region = lowtide.OffloadRegion(f"other-{next(_numbers)}")
    yield region
    region.restore()


@pytest.fixture(autouse=True)
def structures_hold():
    """After each test every region is resident and the allocator's structures agree with one another."""
    yield
    gc.collect()
    evicted = [region for region in lowtide.regions() if region.evicted_bytes]
    for region in evicted:
        region.restore()
    for index in range(_native.device_count()):
        _native.check(index)
    assert not evicted, f"left evicted: {evicted}"
