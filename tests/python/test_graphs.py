"""CUDA graphs captured over a region's memory replay right after it was away."""

import lowtide
import pytest
import torch
from lowtide_testing import assert_away

pytestmark = pytest.mark.cuda


def make_run(region=None):
    """A captured capturable-AdamW step over 100 parameters: (graph, optimizer, parameters).

    The optimizer must outlive the graph, which reads its learning rate's memory.
    """
    generator = torch.Generator(device="cuda").manual_seed(3)
    parameters = [torch.nn.Parameter(torch.randn(50 + 37 * i, device="cuda", generator=generator)) for i in range(100)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, device="cuda", generator=generator)
    optimizer = torch.optim.AdamW(parameters, lr=torch.tensor(0.01, device="cuda"), capturable=True, foreach=True)
    scope = region if region is not None else lowtide.no_region()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), scope:
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph, optimizer, parameters


def test_captured_step_over_twenty_cycles(region):
    graph, optimizer, parameters = make_run(region)
    twin_graph, twin_optimizer, twin_parameters = make_run()
    states = [optimizer.state[parameter] for parameter in parameters]
    twin_states = [twin_optimizer.state[parameter] for parameter in twin_parameters]
    start = [parameter.detach().clone() for parameter in parameters]
    for _ in range(20):
        graph.replay()
        assert region.evict() > 0
        assert_away(*(state["exp_avg"] for state in states))
        scratch = torch.full((4 << 20,), 7.0, device="cuda")  # takes the pages meanwhile
        region.restore()
        del scratch
        twin_graph.replay()
    torch.cuda.synchronize()
    for one, other, before in zip(parameters, twin_parameters, start, strict=True):
        assert torch.equal(one, other)
        assert 0.1 < (one - before).abs().max().item() < 0.5  # 20 steps of at most 0.01 each, and weight decay
    for state, twin_state in zip(states, twin_states, strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(state[key], twin_state[key])


def test_adopted_state_is_captured_after_the_first_offload(device):
    """A pool moves outside tensors once; a graph captured after that stays valid."""
    state = torch.zeros(1000, device=device)
    pool = lowtide.CPUOffloadPool()
    pool.track(state)
    pool.offload()
    pool.reload()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        state.add_(1)
    for _ in range(5):
        graph.replay()
        pool.offload()
        assert_away(state)
        pool.reload()
    assert bool((state == 5).all())


def test_region_open_around_a_capture(region):
    """What a capture allocates is in the graph's private pool; it is never half in the region."""
    with region:
        state = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with region:
        with torch.cuda.graph(graph):
            result = state * 2
            state.add_(1)
    graph.replay()
    assert result.sum().item() == 2000
    region.evict()
    assert result.untyped_storage().nbytes() == 4000 or result.untyped_storage().nbytes() == 0
    region.restore()
    graph.replay()
    torch.cuda.synchronize()
    assert result.sum().item() == 4000
    assert state.sum().item() == 3000
