"""Lowtide as a plain plug-in: torch is given liblowtide.so and nothing else; regions work all the same."""

import lowtide
import torch

allocator = torch.cuda.memory.CUDAPluggableAllocator(lowtide.library_path(), "lowtide_malloc", "lowtide_free")
torch.cuda.memory.change_current_allocator(allocator)
assert lowtide.installed() is None

region = lowtide.OffloadRegion("plugin")
parameters = [torch.nn.Parameter(torch.full((1000,), float(i), device="cuda")) for i in range(4)]
twins = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
optimizer = torch.optim.AdamW(parameters, lr=0.1)
twin = torch.optim.AdamW(twins, lr=0.1)
for step in range(5):
    for one, other in zip(parameters, twins, strict=True):
        one.grad, other.grad = torch.full_like(one, step + 1.0), torch.full_like(other, step + 1.0)
    region.restore()
    with region:
        optimizer.step()
    twin.step()
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in parameters]
    addresses = [moment.data_ptr() for moment in moments]
    assert region.evict() > 0
    assert region.state == "evicted"
    assert all(moment.untyped_storage().nbytes() == 0 for moment in moments)
    for access in (
        moments[0].sum,
        lambda first=moments[0]: first.add_(1),
        lambda first=moments[0]: first[0].item(),
        optimizer.step,
    ):
        try:
            access()
        except RuntimeError as error:
            assert "offload region 'plugin' is evicted" in str(error), error
        else:
            raise AssertionError("no error")
        for parameter, other in zip(parameters, twins, strict=True):
            parameter.data.copy_(other.data)  # a step that raised half way has changed parameters, not states
    region.restore()
    assert addresses == [moment.data_ptr() for moment in moments]
    for one, other in zip(parameters, twins, strict=True):
        optimizer.state[one]["step"].copy_(twin.state[other]["step"])  # on the CPU, and counted by the step that raised
        assert torch.equal(one, other)
        assert torch.equal(optimizer.state[one]["exp_avg"], twin.state[other]["exp_avg"])
        assert torch.equal(optimizer.state[one]["exp_avg_sq"], twin.state[other]["exp_avg_sq"])

pool = lowtide.CPUOffloadPool()
outside = torch.arange(1000, device="cuda")
pool.track([outside, *moments])
for _ in range(3):
    pool.offload()
    assert outside.untyped_storage().nbytes() == 0
    pool.reload()
    assert outside.sum().item() == 499500
region.evict()
del optimizer, moments, access  # freed while evicted, by the plug-in's own deleter
assert region.allocated_bytes == 0
stats = lowtide.memory_stats()
assert stats["evictions"] > 5
torch.cuda.synchronize()
