"""How Lowtide learns which tensors live in a region, and what happens to memory of which it knows none."""

import copy
import gc
import io

import lowtide
import pytest
import torch
from lowtide_testing import Keep, assert_away, evicted, fill, on_host, raw_storage, run_script, storage_bytes

MAKERS = {
    "empty": lambda d: torch.empty(10, device=d),
    "zeros": lambda d: torch.zeros(10, device=d),
    "full": lambda d: torch.full((10,), 3.0, device=d),
    "rand": lambda d: torch.rand(10, device=d),
    "randn": lambda d: torch.randn(10, device=d),
    "arange": lambda d: torch.arange(10, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 10, device=d),
    "eye": lambda d: torch.eye(4, device=d),
    "from a list": lambda d: torch.tensor([1.0, 2.0, 3.0], device=d),
    "empty_strided": lambda d: torch.empty_strided((3, 4), (1, 3), device=d),
    "zeros_like": lambda d: torch.zeros_like(torch.empty(10, device="meta"), device=d),
    "new_ones": lambda d: torch.empty(0, device=d).new_ones(10),
    "sum of two": lambda d: torch.ones(10, device=d) + torch.ones(10, device=d),
    "matmul": lambda d: torch.ones(10, 10, device=d) @ torch.ones(10, 10, device=d),
    "clone": lambda d: torch.ones(10, device=d).clone(),
    "contiguous": lambda d: torch.ones(10, 10, device=d).T.contiguous(),
    "type change": lambda d: torch.ones(10, device=d).double(),
    "from CPU": lambda d: torch.ones(10).to(d, copy=True),
    "foreach": lambda d: torch._foreach_add([torch.ones(10, device=d), torch.ones(10, device=d)], 1.0)[1],
    "tuple of an operator": lambda d: torch.ones(10, device=d).sort()[1],
    "split": lambda d: torch.ones(10, device=d).split(3)[2],
    "cat": lambda d: torch.cat([torch.ones(3, device=d), torch.ones(3, device=d)]),
    "view only": lambda d: torch.ones(10, device=d)[3:],
    "out= that grows": lambda d: torch.add(torch.ones(10, device=d), 1, out=torch.empty(0, device=d)),
    "resize_": lambda d: torch.empty(0, device=d).resize_(100),
    "parameter": lambda d: torch.nn.Parameter(torch.ones(10, device=d)),
    "module": lambda d: torch.nn.Linear(4, 4, device=d).weight,
    "autograd": lambda d: torch.ones(10, device=d, requires_grad=True) * 2,
    "gradient": lambda d: torch.autograd.grad((w := torch.ones(10, device=d, requires_grad=True)).square().sum(), w)[0],
    "sparse": lambda d: torch.eye(4, device=d).to_sparse()._values(),
    "functional": lambda d: torch.func.vmap(lambda row: row * 2)(torch.ones(3, 4, device=d)),
}


def known_and_guarded(region, tensor):
    assert region.allocated_bytes > 0, "nothing was allocated in the region"
    region._native.evict(False)  # without the search through live objects: RecordFunction alone must have seen it
    try:
        assert_away(tensor)
        with pytest.raises(RuntimeError, match=region.name):
            tensor.detach() + 1
    finally:
        region.restore()


@pytest.mark.parametrize("maker", MAKERS)
def test_what_operators_return_is_known(region, device, maker):
    with region:
        tensor = MAKERS[maker](device)
    if maker == "gradient" and not on_host():
        pytest.skip("backward of CUDA tensors runs on autograd's own threads, where no region is open")
    gc.collect()
    known_and_guarded(region, tensor)


def test_what_libraries_keep_is_not_in_the_region():
    run_script("workspaces.py")


def test_deepcopy(region, device):
    """On the host device torch makes the copy's storage with an allocator that cannot be replaced."""
    source = torch.ones(1000, device=device)
    with region:
        tensor = copy.deepcopy(source)
    if on_host():
        assert region.allocated_bytes == 0
        return
    known_and_guarded(region, tensor)


def test_numbers_kept_by_the_autograd_graph(region, device):
    """A number in an expression becomes a tensor below the operators, and the graph keeps it."""
    leaf = torch.ones(10, device=device, requires_grad=True)
    with region:
        result = leaf * 2
    known_and_guarded(region, result)
    result.sum().backward()
    assert bool((leaf.grad == 2).all())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_under_grad_modes(region, device, mode):
    with region, mode():
        tensor = torch.ones(10, device=device)
        known_and_guarded(region, tensor)


def test_torch_load(region, device):
    file = io.BytesIO()
    torch.save({"a": torch.arange(100), "b": [torch.ones(3)]}, file)
    file.seek(0)
    with region:
        loaded = torch.load(file, map_location=device)
    keeps = [Keep(loaded["a"]), Keep(loaded["b"][0])]
    gc.collect()
    known_and_guarded(region, loaded["a"])
    with evicted(region):
        assert_away(loaded["a"], loaded["b"][0])
    for keep in keeps:
        keep.check()


def test_load_state_dict_inside_the_region(region, device):
    parameter = torch.nn.Parameter(torch.ones(100, device=device))
    source = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    source.step()
    target = torch.optim.AdamW([parameter])
    with region:
        target.load_state_dict(
            {**source.state_dict(), "state": {0: {k: v.clone() for k, v in source.state[parameter].items()}}}
        )
    state = target.state[parameter]["exp_avg"]
    gc.collect()
    known_and_guarded(region, state)
    assert torch.equal(state, source.state[parameter]["exp_avg"])


def test_tables_do_not_grow_with_temporaries(region, device):
    with region:
        kept = torch.ones(10, device=device)
        for _ in range(5000):
            torch.ones(10, device=device)
    assert region._native.tracked_storages() == 1
    assert region._native.table_entries() < 500
    with evicted(region):
        assert_away(kept)


def test_memory_that_bypasses_operators_is_found_at_evict(region, device):
    tensor = torch.empty(0, device=device)
    with region:
        tensor.untyped_storage().resize_(4096)
    tensor.set_(tensor.untyped_storage(), 0, (1024,), (1,))
    keep = Keep(fill(tensor))
    assert len(region._native.untracked_blocks()) == 1
    with evicted(region):
        assert_away(tensor)
        with pytest.raises(RuntimeError, match=region.name):
            tensor.sum()
    keep.check()


def test_untracked_memory_refuses_eviction(region, device):
    storage = raw_storage(region, 5000, device)
    with region:
        tensor = torch.ones(100, device=device)
    keep = Keep(tensor)
    with pytest.raises(lowtide.LowtideError) as caught:
        region.evict()
    message = str(caught.value)
    assert f"'{region.name}'" in message
    assert "1 live block of 5000 bytes" in message
    assert "track" in message
    assert 'untracked="unmap"' in message
    assert region.state == "resident"
    keep.check()
    del storage
    with evicted(region):
        assert_away(tensor)
    keep.check()


def test_untracked_memory_may_be_unmapped(region, device):
    storage = raw_storage(region, 5000, device)
    storage.fill_(7)
    assert region.evict(untracked="unmap") >= 5000
    assert region.resident_bytes == 0
    region.restore()
    tensor = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    assert bool((tensor == 7).all())


def test_track_by_hand(region, device):
    storage = raw_storage(region, 5000, device)
    tensor = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    region.track(tensor)
    region.track(tensor)
    region.track(tensor[100:])
    region.track(torch.empty(0, device=device))
    known_and_guarded(region, tensor)
    with evicted(region):
        region.track(tensor)


def test_tracking_what_is_elsewhere_is_refused(region, other_region, device):
    outside = torch.ones(10, device=device)
    with other_region:
        elsewhere = torch.ones(10, device=device)
    with pytest.raises(
        lowtide.LowtideError, match=f"offload region '{region.name}': its memory is in ordinary memory"
    ) as caught:
        region.track(outside)
    assert "CPUOffloadPool" in str(caught.value)
    with pytest.raises(lowtide.LowtideError, match=f"its memory is in offload region '{other_region.name}'"):
        region.track(elsewhere)
    with evicted(other_region):
        with pytest.raises(lowtide.LowtideError, match=other_region.name):
            region.track(elsewhere)
    with pytest.raises(TypeError):
        region.track([outside])
    with pytest.raises(TypeError):
        region.track(None)
    with pytest.raises(ValueError, match="refuse"):
        region.evict(untracked="ignore")


def test_a_second_storage_over_the_same_memory(region, device):
    """An alias made without torch's knowledge is guarded once it is tracked by hand."""
    with region:
        tensor = torch.ones(1000, device=device)
    alias = (
        torch.from_numpy(tensor.numpy())
        if on_host()
        else torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))
    )
    assert alias.untyped_storage()._cdata != tensor.untyped_storage()._cdata
    region.track(alias)
    with evicted(region):
        assert_away(tensor, alias)
        with pytest.raises(RuntimeError, match=region.name):
            alias.sum()
    alias.add_(1)
    assert tensor.sum().item() == 2000
    with evicted(region):
        del alias
    assert tensor.sum().item() == 2000


def test_a_tensor_resized_outside_leaves_the_region(region, device):
    with region:
        tensor = torch.ones(10, device=device)
    tensor.resize_(10_000)
    assert region.allocated_bytes == 0
    region.evict()
    assert tensor.untyped_storage().nbytes() == 40_000
    assert tensor[:10].sum().item() == 10


def test_a_storage_in_use_by_python_only(region, device):
    with region:
        storage = torch.ones(1000, device=device).untyped_storage()
    with evicted(region):
        assert storage.nbytes() == 0
        with pytest.raises(RuntimeError, match=region.name):
            storage.data_ptr()
    assert storage.nbytes() == 4000


def test_wrapper_subclass(region, device):
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

        def __init__(self, inner):
            self.inner = inner

        def __tensor_flatten__(self):
            return ["inner"], None

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError(function)

    storage = raw_storage(region, 400, device)
    inner = torch.empty(0, device=device).set_(storage)
    region.track(Wrapper(inner))
    known_and_guarded(region, inner)


def test_dtensor(region, device, tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("torch was built without torch.distributed's gloo backend")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (1,))
        source = torch.arange(64.0, device=device)
        with region:
            sharded = distribute_tensor(source.clone(), mesh, [Shard(0)])
        assert isinstance(sharded, DTensor)
        region.track(sharded)
        outside = distribute_tensor(source.clone(), mesh, [Shard(0)])
        pool = lowtide.CPUOffloadPool()
        pool.track([sharded, outside])
        pool.offload()
        assert_away(sharded.to_local(), outside.to_local())
        pool.reload()
        assert torch.equal(sharded.to_local(), source)
        assert torch.equal(outside.to_local(), source)
    finally:
        distributed.destroy_process_group()


@pytest.mark.timeout(300)
def test_compiled_code(region, device):
    """What compiled code allocates bypasses the operators; the search at evict finds its tensors."""
    from torch._inductor import config

    # One compiler at once, and none of the headers that only pay for themselves in longer sessions.
    wished = {"compile_threads": 1, "cpp_cache_precompile_headers": False}
    try:
        with config.patch({name: value for name, value in wished.items() if hasattr(config, name)}):
            compiled = torch.compile(lambda x: (x * 2 + 1).relu())
            x = torch.ones(2048, device=device)
            expected = compiled(x).clone()
    except Exception as error:  # noqa: BLE001 - inductor needs a compiler; whatever it says is the missing capability
        pytest.skip(f"torch.compile does not work here: {type(error).__name__}")
    with region:
        result = compiled(x)
    assert region.allocated_bytes > 0
    with evicted(region):
        assert_away(result)
        with pytest.raises(RuntimeError, match=region.name):
            compiled(result)
    assert torch.equal(result, expected)
    assert torch.equal(compiled(result), expected * 2 + 1)


def test_gradients_made_inside_by_mistake_are_evicted_and_guarded(region, device):
    """Everything allocated inside is in the region. An error says so at the next use."""
    weight = torch.ones(100, device=device, requires_grad=True)
    with region:
        weight.grad = torch.ones_like(weight)
    with evicted(region):
        with pytest.raises(RuntimeError, match=region.name):
            (weight * 2).sum().backward()
    weight.grad = None
    (weight * 2).sum().backward()
    assert storage_bytes(weight.grad).numel() == 400
