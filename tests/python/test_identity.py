"""Nothing about a tensor changes by leaving and coming back, whatever its layout, type and size."""

import lowtide
import pytest
import torch
from lowtide_testing import Keep, assert_away, evicted, fill

MIB = 1 << 20

LAYOUTS = {
    "plain": lambda new: new(512, 64),
    "transposed": lambda new: new(512, 64).T,
    "every third row": lambda new: new(512, 64)[::3],
    "every second column": lambda new: new(512, 64)[:, ::2],
    "permuted": lambda new: new(8, 16, 32).permute(2, 0, 1),
    "expanded": lambda new: new(64).expand(4, -1),
    "channels last": lambda new: new(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
    "0-dim": lambda new: new(),
    "offset 7": lambda new: new(100)[7:],
    "as_strided with overlap": lambda new: new(100).as_strided((50, 3), (1, 2), 5),
    "unfold": lambda new: new(100).unfold(0, 10, 3),
    "diagonal": lambda new: new(30, 30).diagonal(),
    "real part": lambda new: torch.view_as_complex(new(50, 2)).real,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(region, device, layout):
    with region:
        tensor = LAYOUTS[layout](lambda *shape: torch.empty(shape, device=device))
    keep = Keep(fill(tensor))
    for _ in range(2):
        with evicted(region):
            assert_away(tensor)
        keep.check()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.quint8,
    ],
    ids=str,
)
def test_dtypes(region, device, dtype):
    with region:
        if dtype is torch.quint8:
            tensor = torch._empty_affine_quantized((1001,), scale=0.5, zero_point=3, dtype=dtype, device=device)
        else:
            tensor = torch.empty(1001, dtype=dtype, device=device)
    keep = Keep(fill(tensor))
    with evicted(region):
        assert_away(tensor)
    keep.check()


@pytest.mark.parametrize("size", [1, 127, 128, 6912, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 20 * MIB + 3])
def test_sizes(region, device, size):
    with region:
        tensor = torch.empty(size, dtype=torch.uint8, device=device)
    keep = Keep(fill(tensor))
    before = lowtide.memory_stats()
    with evicted(region):
        assert_away(tensor)
    keep.check()
    moved = lowtide.memory_stats()["evicted_bytes_total"] - before["evicted_bytes_total"]
    assert size <= moved < size + 512, "what is copied is what is alive, not whole pages"


def test_all_sizes_together_many_times(region, device):
    sizes = [1, 127, 128, 6912, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 5 * MIB + 3]
    with region:
        tensors = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    keeps = [Keep(fill(tensor, seed=i)) for i, tensor in enumerate(tensors)]
    for _ in range(5):
        with evicted(region):
            assert_away(*tensors)
        for keep in keeps:
            keep.check()


def test_views_come_back_with_their_base(region, device):
    with region:
        base = torch.empty(4096, device=device)
    fill(base)
    views = [
        *base.split(1000),
        base.view(8, -1)[:, ::2],
        base.view(64, 64).T,
        base[7:],
        base.view(torch.int32),
        base.detach(),
    ]
    keeps = [Keep(tensor) for tensor in (base, *views)]
    with evicted(region):
        assert_away(base, *views)
    for keep in keeps:
        keep.check()
    base.zero_()
    assert all(int(view.count_nonzero()) == 0 for view in views)


def test_a_view_keeps_the_storage_when_its_base_is_gone(region, device):
    with region:
        view = torch.arange(1000, device=device)[10:20]
    with evicted(region):
        with pytest.raises(RuntimeError, match=region.name):
            view.sum()
    assert view.tolist() == list(range(10, 20))


def test_empty_tensors(region, device):
    with region:
        tensors = [
            torch.empty(0, device=device),
            torch.empty(0, 128, device=device),
            torch.empty(5, 0, 3, device=device),
        ]
    assert region.allocated_bytes == 0
    region.evict()
    assert region.state == "resident"
    with region:
        solid = torch.ones(10, device=device)
    with evicted(region):
        for tensor in tensors:
            assert (tensor + 1).numel() == 0
    assert [tuple(tensor.shape) for tensor in tensors] == [(0,), (0, 128), (5, 0, 3)]
    assert (solid + 1).sum().item() == 20


def test_autograd_leaves_and_versions(region, device):
    with region:
        leaf = torch.ones(10, device=device, requires_grad=True)
    with torch.no_grad():
        leaf.mul_(3)
    keep = Keep(leaf)
    with evicted(region):
        assert leaf.requires_grad
    keep.check()
    (leaf * leaf).sum().backward()
    assert bool((leaf.grad == 6).all())


def test_tensors_saved_for_backward(region, device):
    """Memory that only the autograd graph holds comes back too."""
    x = torch.full((100,), 2.0, device=device, requires_grad=True)
    with region:
        y = (x * x) * x
    with evicted(region):
        with pytest.raises(RuntimeError, match=region.name):
            y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert bool((x.grad == 12).all())


def test_parameters_of_a_module(region, device):
    with region:
        module = torch.nn.Linear(32, 16, device=device)
    keeps = [Keep(parameter) for parameter in module.parameters()]
    x = torch.ones(4, 32, device=device)
    before = module(x).detach().clone()
    with evicted(region):
        with pytest.raises(RuntimeError, match=region.name):
            module(x)
    for keep in keeps:
        keep.check()
    assert torch.equal(module(x), before)


def test_shared_storage_of_two_tensors(region, device):
    with region:
        first = torch.arange(100, device=device)
    second = torch.empty(0, dtype=first.dtype, device=device).set_(first.untyped_storage())
    keep = Keep(second)
    with evicted(region):
        assert_away(first, second)
    keep.check()
    assert first.data_ptr() == second.data_ptr()
