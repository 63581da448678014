"""Training with the optimizer's state away between steps is bit for bit the training without."""

import lowtide
import pytest
import torch
from lowtide_testing import assert_away, on_host

STEPS = 6
FORMS = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad": {"amsgrad": True},
    "capturable": {"capturable": True, "foreach": True},
    "maximize, tensor lr": {"maximize": True, "foreach": False},
}


def make_model(device):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.LayerNorm(96), torch.nn.Linear(96, 10)
        )
    return model.to(device)


def train(device, form, dtype=torch.float32, region=None, pool=None):
    """Six steps; with a region or a pool the state is away except during the step."""
    model = make_model(device).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, **form)
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(16, 64, generator=generator).to(device, dtype)
        loss = model(x).square().mean()
        loss.backward()
        if region is not None:
            region.restore()
            with region:
                optimizer.step()
            assert region.evict() > 0
            state = [
                value
                for entry in optimizer.state.values()
                for value in entry.values()
                if value.device.type == device.type
            ]
            assert_away(*state)
        elif pool is not None:
            if pool.offloaded:
                pool.reload()
            optimizer.step()
            pool.track(optimizer.state.values())
            assert pool.offload() > 0
        else:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if region is not None:
        region.restore()
    if pool is not None:
        pool.reload()
    return losses, list(model.parameters()), [optimizer.state[p] for p in model.parameters()]


def assert_equal_runs(actual, expected):
    losses, parameters, states = actual
    expected_losses, expected_parameters, expected_states = expected
    assert losses == expected_losses
    for parameter, expected_parameter in zip(parameters, expected_parameters, strict=True):
        assert torch.equal(parameter, expected_parameter)
    for state, expected_state in zip(states, expected_states, strict=True):
        assert state.keys() == expected_state.keys()
        for key in state:
            assert torch.equal(state[key], expected_state[key]), key


def form_for(name, device):
    if name == "capturable" and on_host():
        pytest.skip("a capturable optimizer needs CUDA tensors")
    return FORMS[name]


@pytest.mark.parametrize("name", FORMS)
def test_state_born_in_a_region(region, device, name):
    form = form_for(name, device)
    assert_equal_runs(train(device, form, region=region), train(device, form))


@pytest.mark.parametrize("name", FORMS)
def test_state_in_a_pool(device, name):
    form = form_for(name, device)
    assert_equal_runs(train(device, form, pool=lowtide.CPUOffloadPool()), train(device, form))


def test_bfloat16(region, device):
    assert_equal_runs(
        train(device, {"foreach": True}, torch.bfloat16, region), train(device, {"foreach": True}, torch.bfloat16)
    )


def test_the_whole_state_is_in_the_region(region, device):
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 64, device=device)).sum().backward()
    with region:
        optimizer.step()
    ids = {
        lowtide._native.storage_handle(optimizer.state[p][key]).region_id
        for p in model.parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }
    assert ids == {region._native.id}
    assert {lowtide._native.storage_handle(tensor).region_id for p in model.parameters() for tensor in (p, p.grad)} == {
        None
    }


def test_save_and_resume(region, other_region, device, tmp_path):
    """Saved while resident between evictions, loaded into another region, the run goes on as if it had not stopped."""
    expected = train(device, {"foreach": True})

    def run(optimizer, model, generator, steps, scope):
        for _ in range(steps):
            x = torch.randn(16, 64, generator=generator).to(device)
            model(x).square().mean().backward()
            scope.restore()
            with scope:
                optimizer.step()
            scope.evict()
            optimizer.zero_grad()
        scope.restore()

    generator = torch.Generator().manual_seed(7)
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=True)
    run(optimizer, model, generator, 3, region)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")

    resumed = make_model(device)
    resumed_optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.01, weight_decay=0.1, foreach=True)
    checkpoint = torch.load(tmp_path / "checkpoint.pt", map_location="cpu")
    resumed.load_state_dict(checkpoint["model"])
    with other_region:
        resumed_optimizer.load_state_dict(checkpoint["optimizer"])
    run(resumed_optimizer, resumed, generator, 3, other_region)
    states = [resumed_optimizer.state[p] for p in resumed.parameters()]
    assert_equal_runs((expected[0], list(resumed.parameters()), states), expected)


def test_step_in_backward_hooks(region, device):
    """The optimizer steps inside backward, on whatever thread that is."""
    parameters = [torch.nn.Parameter(torch.full((100,), float(i), device=device)) for i in range(3)]
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=0.1) for parameter in parameters}

    def hook(parameter):
        with region:  # a scope is the thread's: autograd's worker enters it itself
            optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(3):
        region.restore()
        sum(parameter.square().sum() for parameter in parameters).backward()
        region.evict()
        assert_away(*(optimizers[parameter].state[parameter]["exp_avg"] for parameter in parameters))
    region.restore()
    twin = [torch.nn.Parameter(torch.full((100,), float(i), device=device)) for i in range(3)]
    for parameter, expected in zip(parameters, twin, strict=True):
        optimizer = torch.optim.AdamW([expected], lr=0.1)
        for _ in range(3):
            expected.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(parameter, expected)
