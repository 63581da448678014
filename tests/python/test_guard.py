"""Using a tensor of an evicted region raises an error that names the region, and harms nothing."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import lowtide
import pytest
import torch
import torch.nn.functional as F
from lowtide_testing import Keep, evicted, fill, on_host
from torch.utils import dlpack

# Each takes the evicted tensor t (float32, 6 by 4), and x of the same shape, resident.
ACCESSES = {
    # arithmetic
    "t + 1": lambda t, x: t + 1,
    "t + x": lambda t, x: t + x,
    "x * t": lambda t, x: x * t,
    "t @ x.T": lambda t, x: t @ x.T,
    "linear": lambda t, x: F.linear(x, t),
    "softmax": lambda t, x: t.softmax(0),
    "sum": lambda t, x: t.sum(),
    "mean over a dimension": lambda t, x: t.mean(1),
    "equal": lambda t, x: torch.equal(t, x),
    "compare": lambda t, x: t == x,
    "where": lambda t, x: torch.where(x > 0, t, x),
    "einsum": lambda t, x: torch.einsum("ij,ij->i", t, x),
    "sort": lambda t, x: t.sort(),
    "isnan": lambda t, x: t.isnan().any(),
    "norm": lambda t, x: t.norm(),
    # in place
    "add_": lambda t, x: t.add_(1),
    "mul_ by a tensor": lambda t, x: t.mul_(x),
    "zero_": lambda t, x: t.zero_(),
    "fill_": lambda t, x: t.fill_(3),
    "normal_": lambda t, x: t.normal_(),
    "t[0] = 1": lambda t, x: t.__setitem__(0, 1),
    "index_put_": lambda t, x: t.index_put_((torch.tensor([0], device=t.device),), x[:1]),
    "out=": lambda t, x: torch.mul(x, 2, out=t),
    "addcmul_": lambda t, x: t.addcmul_(x, x),
    "lerp_ with it as the end": lambda t, x: x.lerp_(t, 0.5),
    # views
    "view": lambda t, x: t.view(-1) + 1,
    "slice": lambda t, x: t[1:] * 2,
    "transpose": lambda t, x: t.T.contiguous(),
    "expand": lambda t, x: t[:, :1].expand(6, 9).sum(),
    "select and item": lambda t, x: t[0, 0].item(),
    "iterate": lambda t, x: [row + 1 for row in t],
    "detach": lambda t, x: t.detach() + 1,
    ".data": lambda t, x: t.data.add_(1),
    "view as int": lambda t, x: t.view(torch.int32) + 1,
    "masked_select": lambda t, x: t[x > 0],
    # foreach
    "_foreach_add_": lambda t, x: torch._foreach_add_([x, t], 1.0),
    "_foreach_mul": lambda t, x: torch._foreach_mul([t, x], 2.0),
    "_foreach_norm": lambda t, x: torch._foreach_norm([t]),
    "_foreach_copy_ from it": lambda t, x: torch._foreach_copy_([x], [t]),
    "_foreach_copy_ into it": lambda t, x: torch._foreach_copy_([t], [x]),
    "_foreach_zero_": lambda t, x: torch._foreach_zero_([t]),
    # copies
    "copy_ into it": lambda t, x: t.copy_(x),
    "copy_ from it": lambda t, x: x.copy_(t),
    "clone": lambda t, x: t.clone(),
    "to another type": lambda t, x: t.to(torch.float64),
    "cpu": lambda t, x: t.cpu() + 0,
    "cat": lambda t, x: torch.cat([x, t]),
    "stack": lambda t, x: torch.stack([t, x]),
    "repeat": lambda t, x: t.repeat(2, 1),
    # leaving torch
    "repr": lambda t, x: repr(t),
    "str": lambda t, x: str(t),
    "format": lambda t, x: f"{t.sum()}",
    "tolist": lambda t, x: t.tolist(),
    "bool": lambda t, x: bool(t.any()),
    "data_ptr": lambda t, x: t.data_ptr(),
    "dlpack": lambda t, x: dlpack.to_dlpack(t),
    "__dlpack__": lambda t, x: t.__dlpack__(),
    "torch.save": lambda t, x: torch.save(t, io.BytesIO()),
    "pickle": lambda t, x: pickle.dumps(t),
    "deepcopy": lambda t, x: copy.deepcopy(t),
    # its storage
    "storage data_ptr": lambda t, x: t.untyped_storage().data_ptr(),
    "storage fill_": lambda t, x: t.untyped_storage().fill_(0),
    "storage resize_ up": lambda t, x: t.untyped_storage().resize_(1000),
    "storage resize_ to 0": lambda t, x: t.untyped_storage().resize_(0),
    "storage clone": lambda t, x: t.untyped_storage().clone(),
    "storage into another": lambda t, x: x.untyped_storage().copy_(t.untyped_storage()),
    # autograd
    "forward and backward": lambda t, x: (t * x.clone().requires_grad_()).sum().backward(),
}
HOST_ACCESSES = {
    "numpy": lambda t, x: t.numpy(),
    "__array__": lambda t, x: t.__array__(),
    "share_memory_": lambda t, x: t.share_memory_(),
}
CUDA_ACCESSES = {
    "record_stream": lambda t, x: t.record_stream(torch.cuda.current_stream()),
    "__cuda_array_interface__": lambda t, x: t.__cuda_array_interface__["data"],
    "to cpu, non blocking": lambda t, x: torch.empty(6, 4, pin_memory=True).copy_(t, non_blocking=True),
}

# Questions about the storage's size in C++, where an answer and an access cannot be told apart: torch's words.
SIZE_QUESTIONS = {
    "storage copy_ into it": lambda t, x: t.untyped_storage().copy_(x.untyped_storage()),
    "len(storage)": lambda t, x: len(t.untyped_storage()),
    "typed storage": lambda t, x: t.storage()[0],
}
# resize_ asks that question on CUDA, and since torch 2.12 or later on the CPU too; there it looked at the data first.
RESIZE_ASKS_FOR_SIZE = not on_host() or not torch.__version__.startswith("2.11.")
RESIZE = {"resize_ to a smaller shape": lambda t, x: t.resize_(3, 2) + 1}
(SIZE_QUESTIONS if RESIZE_ASKS_FOR_SIZE else ACCESSES).update(RESIZE)
if not on_host():
    SIZE_QUESTIONS["_share_cuda_"] = lambda t, x: t.untyped_storage()._share_cuda_()


@pytest.fixture
def pair(region, device):
    with region:
        t = torch.empty(6, 4, device=device)
    x = torch.ones(6, 4, device=device)
    with torch.no_grad():
        t.copy_(torch.arange(24, device=device).view(6, 4))
    return t, x


def access_cases():
    cases = dict(ACCESSES)
    cases.update(HOST_ACCESSES if on_host() else CUDA_ACCESSES)
    return cases


def pytest_generate_tests(metafunc):
    if "access" in metafunc.fixturenames:
        cases = access_cases()
        metafunc.parametrize("access", cases.values(), ids=cases.keys())


def test_access_raises(region, pair, device, access):
    t, x = pair
    keep = Keep(t)
    version = t._version
    with evicted(region):
        with pytest.raises(RuntimeError) as caught:
            access(t, x)
        assert f"offload region '{region.name}' is evicted" in str(caught.value)
        assert "region.restore()" in str(caught.value)
        assert t.untyped_storage().nbytes() == 0
    if t._version != version:
        keep.before["version"] = t._version  # torch counts an in-place operation that then raised
    keep.check()
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert (torch.ones(2, device=device) + 1).sum().item() == 4


@pytest.mark.parametrize("case", SIZE_QUESTIONS)
def test_questions_about_size_in_cpp_raise(region, pair, case):
    t, x = pair
    keep = Keep(t)
    with evicted(region):
        with pytest.raises((RuntimeError, IndexError)):
            SIZE_QUESTIONS[case](t, x)
    if t.shape != (6, 4):
        t.resize_(6, 4)  # resize_ had set the shape before it asked
        keep.before["version"] = t._version  # and torch counted both
    keep.check()


def test_in_inference_mode(region, device):
    """There torch's own bounds check may speak first, of a storage of size 0; an error all the same."""
    with torch.inference_mode():
        with region:
            t = torch.arange(24.0, device=device).view(6, 4)
        x = torch.ones(3, 4, device=device)
        with evicted(region):
            assert t.untyped_storage().nbytes() == 0
            with pytest.raises(RuntimeError, match=region.name):
                t + 1
            with pytest.raises(RuntimeError, match="storage of size 0"):
                F.linear(x, t)
        assert t.sum().item() == 276


def test_a_new_shape_given_while_evicted(region, pair):
    """resize_ sets the shape before it asks for memory, and leaves it so when that fails: torch's way."""
    t, _ = pair
    with evicted(region):
        words = "size_bytes_is_heap_allocated_" if RESIZE_ASKS_FOR_SIZE else region.name
        with pytest.raises(RuntimeError, match=words):
            t.resize_(20, 20)
    t.resize_(6, 4)
    assert t[5, 3].item() == 23


def test_looking_at_the_shape_works(region, pair):
    t, _ = pair
    with evicted(region):
        assert t.shape == (6, 4)
        assert t.stride() == (4, 1)
        assert t.view(-1).shape == (24,)
        assert t.detach().shape == (6, 4)
        assert t.numel() == 24
        assert t.is_contiguous()
        assert t.untyped_storage().nbytes() == t.untyped_storage().size() == 0
        assert not t.requires_grad
        assert torch.empty_like(t, device="meta").shape == (6, 4)
        assert torch.zeros_like(t).sum().item() == 0


def test_assigning_data_lets_go_of_the_evicted_storage(region, pair, device):
    t, _ = pair
    with evicted(region):
        t.data = torch.ones(3, device=device)
        assert t.sum().item() == 3
        assert region.allocated_bytes == 0


OPTIMIZERS = {
    "Adam": lambda parameters, **form: torch.optim.Adam(parameters, lr=0.1, **form),
    "AdamW": lambda parameters, **form: torch.optim.AdamW(parameters, lr=0.1, **form),
    "SGD": lambda parameters, **form: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **form),
}
FORMS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_step_raises(region, device, optimizer, form):
    parameters = [torch.nn.Parameter(fill(torch.empty(50, device=device), seed=i).clamp(-1, 1)) for i in range(3)]
    opt = OPTIMIZERS[optimizer](parameters, **FORMS[form])

    def step():
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5)
        opt.step()

    with region:
        step()
    state = [
        value
        for entry in opt.state.values()
        for value in entry.values()
        if torch.is_tensor(value) and value.device == device
    ]
    assert state
    keeps = [Keep(value) for value in state]
    with evicted(region):
        with pytest.raises(RuntimeError, match=f"offload region '{region.name}' is evicted"):
            step()
        opt.zero_grad()
    for keep in keeps:
        keep.before["version"] = keep.tensor._version
        keep.check()
    step()


def test_state_dict_of_an_evicted_optimizer_can_be_taken_but_not_saved(region, device):
    parameter = torch.nn.Parameter(torch.ones(50, device=device))
    opt = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    with region:
        opt.step()
    with evicted(region):
        state = opt.state_dict()
        with pytest.raises(RuntimeError, match=region.name):
            torch.save(state, io.BytesIO())
        with pytest.raises(RuntimeError, match=region.name):
            copy.deepcopy(state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = torch.load(file)
    assert torch.equal(again["state"][0]["exp_avg"], opt.state[parameter]["exp_avg"])


def test_the_error_of_a_pool_names_its_remedy(device):
    tensor = torch.ones(100, device=device)
    pool = lowtide.CPUOffloadPool("remedy")
    pool.track(tensor)
    pool.offload()
    try:
        with pytest.raises(
            RuntimeError, match=r"offload region 'remedy' is evicted; call reload\(\) of its CPUOffloadPool"
        ):
            tensor.sum()
    finally:
        pool.reload()


def test_another_poison_survives_the_restore(region, device):
    """torch poisons storages the same way (a CUDA graph tree's memory that was reused): that must come back."""
    with region:
        tensor = torch.ones(10, device=device)
    torch._C._set_storage_data_ptr_access_error_msg(tensor.untyped_storage()._cdata, "poisoned by torch")
    for _ in range(2):
        with evicted(region):
            with pytest.raises(RuntimeError, match=region.name):
                tensor.sum()
        with pytest.raises(RuntimeError, match="poisoned by torch"):
            tensor.sum()


def test_a_poison_set_while_evicted_stays(region, device):
    with region:
        tensor = torch.ones(10, device=device)
    with evicted(region):
        torch._C._set_storage_data_ptr_access_error_msg(tensor.untyped_storage()._cdata, "poisoned meanwhile")
        with pytest.raises(RuntimeError, match="poisoned meanwhile"):
            tensor.sum()
    assert tensor.untyped_storage().nbytes() == 40
    with pytest.raises(RuntimeError, match="poisoned meanwhile"):
        tensor.sum()


def test_write_protection_survives_the_restore(region, device):
    with region:
        tensor = torch.ones(10, device=device)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    with evicted(region):
        with pytest.raises(RuntimeError, match=region.name):
            tensor.sum()
    with pytest.raises(RuntimeError):
        tensor.add_(1)
    assert tensor.sum().item() == 10


def test_sending_to_another_process_raises(region, device):
    if not on_host():
        pytest.skip("CUDA tensors are sent by CUDA IPC, which is refused")
    with region:
        tensor = torch.ones(8, device=device)
        layer = torch.nn.Linear(4, 4, device=device)
    with evicted(region):
        for sent in (tensor, layer, {"state": [tensor]}):
            with pytest.raises(RuntimeError, match=f"'{region.name}' is evicted; call region.restore"):
                ForkingPickler.dumps(sent)
    ForkingPickler.dumps(tensor)
    ForkingPickler.dumps(torch.empty(0))


def test_asking_whether_it_is_shared_raises(region, device):
    if not on_host():
        pytest.skip("every CUDA tensor says that it is shared")
    with region:
        tensor = torch.ones(8, device=device)
    assert not tensor.is_shared()
    with evicted(region):
        for ask in (tensor.is_shared, tensor.untyped_storage().is_shared):
            with pytest.raises(RuntimeError, match="is evicted"):
                ask()
    assert torch.ones(8).share_memory_().is_shared()


def test_a_lazy_copy_made_outside_keeps_its_region_here(region, device):
    with region:
        tensor = torch.ones(8, device=device)
    copy = torch._lazy_clone(tensor)
    with pytest.raises(lowtide.LowtideError, match="lazy copy"):
        region.evict()
    assert copy.sum().item() == tensor.sum().item() == 8
    copy.add_(1)
    tensor.add_(0)  # the last one that shares takes the bytes
    with evicted(region):
        assert copy.sum().item() == 16
    assert tensor.sum().item() == 8
