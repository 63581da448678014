"""CPUOffloadPool: tensors from anywhere leave and come back."""

import copy
import gc
import itertools
import random
import threading

import lowtide
import pytest
import torch
from lowtide_testing import Keep, assert_away, fill, on_host, raw_storage, run_script

MIB = 1 << 20


@pytest.fixture
def pool():
    pool = lowtide.CPUOffloadPool()
    yield pool
    if pool.offloaded:
        pool.reload()


class KeepAfterMove(Keep):
    """Keep for a tensor that its first offload moves into a region: its address may change that once."""

    def moved(self):
        now = self._look()
        self.before["data_ptr"], self.before["storage data_ptr"] = now["data_ptr"], now["storage data_ptr"]


def cycle(pool, *keeps):
    pool.offload()
    assert_away(*(keep.tensor for keep in keeps))
    pool.reload()


def test_tensors_from_anywhere(pool, region, device):
    outside = fill(torch.empty(MIB, dtype=torch.uint8, device=device))
    with region:
        inside = fill(torch.empty(MIB, dtype=torch.uint8, device=device), seed=3)
    pool.track([outside, inside])
    keep_outside, keep_inside = KeepAfterMove(outside), Keep(inside)
    assert pool.tracked_bytes == 2 * MIB
    cycle(pool, keep_outside, keep_inside)
    keep_outside.moved()
    for _ in range(3):
        keep_outside.check()
        keep_inside.check()
        cycle(pool, keep_outside, keep_inside)


def test_offload_says_how_much_left(pool, device):
    tensors = [torch.ones(MIB, dtype=torch.uint8, device=device) for _ in range(4)]
    pool.track(tensors)
    before = lowtide.memory_stats()["evicted_bytes"]
    assert pool.offload() == 4 * MIB
    assert lowtide.memory_stats()["evicted_bytes"] - before == 4 * MIB
    pool.reload()
    assert lowtide.memory_stats()["evicted_bytes"] == before


def test_tracking_is_idempotent(pool, device):
    base = torch.ones(1000, device=device)
    for _ in range(3):
        pool.track(base)
        pool.track([base, base[10:], base.view(10, 100).T, base.detach()])
    assert pool.tracked_bytes == 4000
    assert pool.offload() == 4096
    pool.reload()


def test_what_is_skipped(pool, device):
    pool.track(None)
    pool.track(
        [None, torch.empty(0, device=device), torch.empty(5, 0, 3, device=device), torch.empty(10, device="meta")]
    )
    if not on_host():
        pool.track(torch.ones(10))
    assert pool.tracked_bytes == 0
    assert pool.offload() == 0
    pool.reload()
    assert (torch.ones(1, device=device) + 1).item() == 2


def test_what_is_refused(pool):
    for nonsense in ("x", 3, [torch.ones(1), "x"], {"a": 3.0}):
        with pytest.raises(TypeError):
            pool.track(nonsense)
    assert pool.tracked_bytes == 0


def test_what_is_accepted(pool, device):
    first, second, third, fourth = (torch.ones(128, device=device) for _ in range(4))
    pool.track({"a": first, "b": [second, None]})
    pool.track(tensor for tensor in (third,))
    pool.track(torch.nn.Parameter(fourth))
    assert pool.tracked_bytes == 4 * 512
    pool.offload()
    assert_away(first, second, third, fourth)
    pool.reload()


def test_wrong_order_raises(pool, device):
    with pytest.raises(RuntimeError, match="not offloaded"):
        pool.reload()
    tensor = torch.ones(100, device=device)
    pool.track(tensor)
    pool.offload()
    with pytest.raises(RuntimeError, match="offloaded already"):
        pool.offload()
    assert_away(tensor)
    pool.reload()
    assert tensor.sum().item() == 100
    with pytest.raises(RuntimeError, match="not offloaded"):
        pool.reload()


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.randn(512, 100, device=d).T,
        lambda d: torch.randn(100, 30, device=d)[::3],
        lambda d: torch.randn(8, 16, 32, device=d).permute(2, 0, 1),
        lambda d: torch.randn(64, device=d).expand(4, -1),
        lambda d: torch.randn(2, 3, 8, 8, device=d).contiguous(memory_format=torch.channels_last),
        lambda d: torch.randn((), device=d),
        lambda d: torch.randn(100, device=d)[7:],
        lambda d: torch.randn(100, device=d).as_strided((50, 3), (1, 2), 5),
    ],
    ids=["T", "rows", "permuted", "expanded", "channels_last", "0-dim", "offset", "overlap"],
)
def test_layouts(pool, device, make):
    tensor = make(device)
    pool.track(tensor)
    keep = KeepAfterMove(tensor)
    storage = tensor.untyped_storage().nbytes()
    assert storage <= pool.offload() < storage + 512
    assert_away(tensor)
    pool.reload()
    keep.moved()
    keep.check()
    cycle(pool, keep)
    keep.check()


def test_views_follow_their_base(pool, device):
    base = torch.randn(64 * 1024, device=device)
    views = [*base.split(10_000), base.view(8, -1)[:, ::2], base.view(256, 256).T]
    pool.track(base)
    keeps = [KeepAfterMove(tensor) for tensor in (base, *views)]
    cycle(pool, *keeps)
    for keep in keeps:
        keep.moved()
        keep.check()
        assert keep.tensor.untyped_storage().data_ptr() == base.data_ptr()


def test_tensors_tracked_later(pool, device):
    first = torch.full((1000,), 1.0, device=device)
    pool.track(first)
    cycle(pool, Keep(first))
    second = torch.full((1000,), 2.0, device=device)
    pool.track(second)
    cycle(pool, Keep(first), Keep(second))
    pool.offload()
    third = torch.full((1000,), 3.0, device=device)
    pool.track([third, first])
    assert third.sum().item() == 3000
    pool.reload()
    cycle(pool, Keep(first), Keep(second), Keep(third))
    assert [tensor.unique().item() for tensor in (first, second, third)] == [1, 2, 3]


def test_tensors_that_die(pool, device):
    tensors = [torch.full((1000,), float(i), device=device) for i in range(6)]
    pool.track(tensors)
    del tensors[0]
    pool.offload()
    del tensors[0]
    gc.collect()
    pool.reload()
    del tensors[0]
    gc.collect()
    assert pool.tracked_bytes == 3 * 4000
    cycle(pool, *map(Keep, tensors))
    assert [tensor.unique().item() for tensor in tensors] == [3, 4, 5]
    tensors.clear()
    gc.collect()
    assert pool.offload() == 0
    pool.reload()


def test_the_pool_keeps_nothing_alive(device):
    pool = lowtide.CPUOffloadPool("weak")
    tensor = torch.ones(1000, device=device)
    pool.track(tensor)
    cycle(pool, Keep(tensor))
    storage = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
    del tensor
    gc.collect()
    assert storage.expired()
    assert lowtide.region("weak").allocated_bytes == 0


def test_a_pool_that_dies_while_offloaded(device):
    tensor = torch.arange(1000, device=device)
    pool = lowtide.CPUOffloadPool("dead-pool")
    pool.track(tensor)
    pool.offload()
    del pool
    gc.collect()
    with pytest.raises(RuntimeError, match="dead-pool"):
        tensor.sum()
    lowtide.region("dead-pool").restore()
    assert tensor.sum().item() == 999 * 500


def test_parameters_and_gradients(pool, device):
    module = torch.nn.Linear(64, 64, device=device)
    module(torch.ones(2, 64, device=device)).sum().backward()
    pool.track(module.parameters())
    pool.track(parameter.grad for parameter in module.parameters())
    x = torch.ones(2, 64, device=device)
    before = module(x).detach().clone()
    pool.offload()
    with pytest.raises(RuntimeError, match="evicted"):
        module(x)
    pool.reload()
    assert torch.equal(module(x), before)
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in module.parameters())
    module(x).sum().backward()


def test_optimizer_in_two_groups(device):
    """Each tensor gets its own bytes back, whatever the order of tracking against that of allocation."""
    parameters = [torch.nn.Parameter(torch.ones(200 + i, device=device)) for i in range(10)]
    optimizer = torch.optim.AdamW([{"params": parameters[::2], "lr": 0.1}, {"params": parameters[1::2], "lr": 0.2}])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for i, parameter in enumerate(parameters):
        optimizer.state[parameter]["exp_avg"].fill_(i)
    pool = lowtide.CPUOffloadPool()
    states = [optimizer.state[parameter] for parameter in parameters]
    random.Random(4).shuffle(states)
    pool.track(states)
    for _ in range(2):
        pool.offload()
        pool.reload()
        assert all(bool((optimizer.state[p]["exp_avg"] == i).all()) for i, p in enumerate(parameters))
    extra = torch.nn.Parameter(torch.ones(5, device=device))
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones_like(extra)
    optimizer.step()
    pool.track(optimizer.state.values())
    expected = copy.deepcopy({i: optimizer.state[p]["exp_avg"] for i, p in enumerate(parameters)})
    pool.offload()
    assert_away(optimizer.state[extra]["exp_avg"])
    pool.reload()
    assert all(torch.equal(optimizer.state[p]["exp_avg"], expected[i]) for i, p in enumerate(parameters))


def test_fresh_optimizer_is_left_alone(pool, device):
    parameter = torch.nn.Parameter(torch.ones(5, device=device))
    optimizer = torch.optim.AdamW([parameter])
    pool.track(optimizer.state.values())
    pool.offload()
    pool.reload()
    assert len(optimizer.state) == 0


def test_memory_that_torch_does_not_own_is_refused(pool, device):
    good = torch.ones(1000, device=device)
    if on_host():
        foreign = torch.from_numpy(__import__("numpy").ones(1000, dtype="float32"))
    else:
        foreign = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(torch.ones(1000, device=device)))
    pool.track([good, foreign])
    address = good.data_ptr()
    with pytest.raises(RuntimeError, match="does not own its memory"):
        pool.offload()
    assert not pool.offloaded
    assert good.data_ptr() == address
    assert good.sum().item() == foreign.sum().item() == 1000


def test_memory_shared_with_another_process_is_refused(pool, device):
    tensor = torch.ones(1000, device=device)
    if on_host():
        tensor.share_memory_()
    else:
        try:
            tensor.untyped_storage()._share_cuda_()
        except RuntimeError as error:
            pytest.skip(f"CUDA IPC of this memory: {error}")
    pool.track(tensor)
    with pytest.raises(RuntimeError, match="shared|does not own"):
        pool.offload()
    assert tensor.sum().item() == 1000


def test_interference_is_reported(pool, device, monkeypatch):
    tensor, other = torch.ones(1000, device=device), torch.ones(1000, device=device)
    pool.track([tensor, other])
    pool.offload()
    if on_host():
        # No call of torch's Python can change a guarded CPU storage: they all raise. So the count is given.
        with pytest.raises(RuntimeError, match="evicted"):
            tensor.untyped_storage().resize_(10)
        monkeypatch.setattr(lowtide._native.Region, "take_changed_storages", lambda self: 1)
    else:
        torch.ops.inductor.resize_storage_bytes_(tensor, 0)  # on CUDA torch does this without a look at the data
    with pytest.raises(RuntimeError, match=r"1 storage\(s\) .* were given other memory"):
        pool.reload()
    assert not pool.offloaded
    assert other.sum().item() == 1000


def test_restoring_the_region_behind_the_pools_back(pool, device):
    """Harmless: what reload() brings back is there already."""
    tensor = torch.ones(1000, device=device)
    pool.track(tensor)
    pool.offload()
    lowtide.region(pool.name).restore()
    assert tensor.sum().item() == 1000
    pool.reload()
    assert tensor.sum().item() == 1000


def test_two_pools_with_tensors_of_one_region(region, device):
    with region:
        first, second = torch.ones(1000, device=device), torch.ones(1000, device=device)
    one, two = lowtide.CPUOffloadPool(), lowtide.CPUOffloadPool()
    one.track(first)
    two.track(second)
    one.offload()
    assert_away(first, second)  # a region moves as a whole
    assert two.offload() == 0
    one.reload()
    two.reload()
    assert first.sum().item() == second.sum().item() == 1000


def test_a_refused_eviction_brings_back_the_regions_before_it(pool, region, other_region, device):
    with region:
        first = torch.ones(1000, device=device)
    with other_region:
        second = torch.ones(1000, device=device)
    storage = raw_storage(other_region, 5000, device)
    pool.track([first, second])
    with pytest.raises(RuntimeError, match="1 live block of 5000 bytes"):
        pool.offload()
    assert not pool.offloaded
    assert (region.state, other_region.state) == ("resident", "resident")
    assert first.sum().item() == second.sum().item() == 1000
    del storage
    pool.offload()
    pool.reload()


def test_many_pools_on_many_threads(device):
    errors = []

    def work(number):
        try:
            random_order = random.Random(number)
            pools = [lowtide.CPUOffloadPool() for _ in range(3)]
            keeps = []
            for i, pool in enumerate(pools):
                tensors = [
                    torch.full((random_order.randint(1, 50_000),), number * 10 + i, device=device) for _ in range(5)
                ]
                pool.track(tensors)
                pool.offload()
                pool.reload()
                keeps += [Keep(tensor) for tensor in tensors]
            for _ in range(6):
                for pool in random_order.sample(pools, 3):
                    pool.offload()
                for pool in random_order.sample(pools, 3):
                    pool.reload()
                for keep in keeps:
                    keep.check()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


SEQUENCES = list(itertools.product(("offload", "reload", "gc", "track", "drop", "write"), repeat=4))


@pytest.mark.parametrize("part", range(4))
def test_all_short_sequences_against_a_model(device, part):
    """Every sequence of four operations does what a plain model says: no other errors, no lost bytes."""
    for sequence in SEQUENCES[part::4]:
        pool = lowtide.CPUOffloadPool("model")
        tensors, values, away = [], [], False
        for i in range(2):
            tensors.append(torch.full((300,), float(i), device=device))
            values.append(float(i))
        pool.track(tensors)
        out = set()
        for step, operation in enumerate((*sequence, "reload")):
            if operation == "offload":
                if away:
                    with pytest.raises(RuntimeError, match="already"):
                        pool.offload()
                else:
                    pool.offload()
                    away, out = True, set(map(id, tensors))
            elif operation == "reload":
                if away:
                    pool.reload()
                    away, out = False, set()
                else:
                    with pytest.raises(RuntimeError, match="not offloaded"):
                        pool.reload()
            elif operation == "gc":
                gc.collect(0)
            elif operation == "track":
                tensors.append(torch.full((300,), 10.0 + step, device=device))
                values.append(10.0 + step)
                pool.track(tensors[-1])
            elif operation == "drop" and len(tensors) > 1:
                out.discard(id(tensors.pop(0)))
                values.pop(0)
            elif operation == "write":
                if id(tensors[-1]) in out:
                    with pytest.raises(RuntimeError, match="evicted"):
                        tensors[-1].add_(1)
                else:
                    tensors[-1].add_(1)
                    values[-1] += 1
            for tensor, value in zip(tensors, values, strict=True):
                if id(tensor) in out:
                    assert tensor.untyped_storage().nbytes() == 0
                else:
                    assert tensor[0].item() == tensor[299].item() == value, sequence


@pytest.mark.cuda
def test_several_devices(pool):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    tensors = [torch.full((1000,), float(i), device=f"cuda:{i}") for i in range(2)]
    for current, operation in ((1, pool.track), (0, None), (1, None)):
        with torch.cuda.device(current):
            if operation is not None:
                operation(tensors)
            pool.offload()
            assert_away(*tensors)
            assert torch.cuda.current_device() == current
            pool.reload()
            assert torch.cuda.current_device() == current
    assert [tensor.device.index for tensor in tensors] == [0, 1]
    assert [tensor.unique().item() for tensor in tensors] == [0, 1]


@pytest.mark.cuda
def test_adoption_is_ordered_between_streams(pool):
    """The old memory is freed in the order of its own stream; nothing reads or writes it too early or too late."""
    side = torch.cuda.Stream()
    for _ in range(20):
        tensor = torch.zeros(8 * MIB, device="cuda")
        pool.track(tensor)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            tensor.add_(1)
            pool.offload()
        garbage = torch.full((8 * MIB,), 9.0, device="cuda")
        pool.reload()
        assert bool((tensor == 1).all())
        del garbage


@pytest.mark.cuda
def test_memory_of_a_graphs_pool_is_refused(pool):
    graph = torch.cuda.CUDAGraph()
    static = torch.ones(100, device="cuda")
    with torch.cuda.graph(graph):
        result = static * 2
    pool.track(result)
    with pytest.raises(RuntimeError, match="private pool"):
        pool.offload()
    graph.replay()
    assert result.sum().item() == 200


def test_one_line_is_logged_at_first_use():
    result = run_script("pool_log.py", env={"LOWTIDE_LOG": "info"}, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if "pool 'logged'" in line]
    assert len(lines) == 1
    assert "3 tensors in 1 groups, 3.1 MB" in lines[0]


@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupted_offload_leaves_a_pool_that_can_come_back(pool, device, monkeypatch, interrupted):
    regions = [lowtide.OffloadRegion(f"interrupted {interrupted} {i}") for i in range(2)]
    keeps = []
    for region in regions:
        with region:
            keeps.append(Keep(torch.arange(1000.0, device=device)))
    pool.track([keep.tensor for keep in keeps])
    evict = lowtide.OffloadRegion.evict
    count = itertools.count()

    def evict_and_be_interrupted(region):
        moved = evict(region)
        if next(count) == interrupted:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(lowtide.OffloadRegion, "evict", evict_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.offload()
    assert not pool.offloaded
    for keep in keeps:
        keep.check()

    # Interrupted while it brings back too: everything is still reload()'s to bring.
    restore = lowtide.OffloadRegion.restore
    monkeypatch.setattr(lowtide.OffloadRegion, "restore", lambda region: (_ for _ in ()).throw(KeyboardInterrupt))
    count = itertools.count()
    with pytest.raises(KeyboardInterrupt):
        pool.offload()
    assert pool.offloaded
    monkeypatch.setattr(lowtide.OffloadRegion, "restore", restore)
    pool.reload()
    for keep in keeps:
        keep.check()
