"""Installing, and refusing to."""

import os
import subprocess
import sys

import lowtide
import pytest
import torch
from lowtide import _build_info, _native, _torch_version
from lowtide_testing import run_script

needs_no_cuda = pytest.mark.skipif(_native.cuda_device_count() > 0, reason="needs a machine without a CUDA device")


def test_import_changes_nothing():
    run_script("install.py", "import changes nothing")


@pytest.mark.parametrize("case", ["auto", "host", "another allocator"])
def test_install(case):
    run_script("install.py", case)


@needs_no_cuda
def test_cuda_where_there_is_none():
    run_script("install.py", "cuda where there is none")


@pytest.mark.cuda
@pytest.mark.parametrize("case", ["cuda", "change_current_allocator", "after CUDA"])
def test_install_on_cuda(case):
    run_script("install.py", case)


def test_again_does_nothing():
    device = lowtide.installed()
    lowtide.install(device)
    lowtide.install("auto")
    assert lowtide.installed() == device
    with pytest.raises(lowtide.LowtideError):
        lowtide.install("host" if device == "cuda" else "cuda")
    assert lowtide.installed() == device


@pytest.mark.parametrize("version", ["2.10.0", "2.99.1+cu130", "3.11.0"])
def test_another_torch_is_refused(monkeypatch, version):
    monkeypatch.setattr(_build_info, "TORCH_VERSION", version)
    with pytest.raises(ImportError) as caught:
        _torch_version.require_matching_torch()
    message = str(caught.value)
    assert version in message
    assert str(torch.__version__) in message
    assert "pip install" in message
    assert f"make build TORCH={torch.__version__.split('+')[0]}" in message


def test_another_patch_of_the_same_minor_is_accepted(monkeypatch):
    major, minor = str(torch.__version__).split(".")[:2]
    monkeypatch.setattr(_build_info, "TORCH_VERSION", f"{major}.{minor}.99+cpu")
    _torch_version.require_matching_torch()


def test_import_under_another_torch_says_so():
    """The whole way: the package is imported while the build's version is another."""
    script = (
        "import sys, types\n"
        "info = types.ModuleType('lowtide._build_info')\n"
        "info.TORCH_VERSION, info.LOWTIDE_VERSION = '2.3.4', '0'\n"
        "sys.modules['lowtide._build_info'] = info\n"
        "try:\n    import lowtide\nexcept ImportError as error:\n    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert "was built for torch 2.3.4" in result.stdout, result.stderr
    assert str(torch.__version__) in result.stdout


def test_the_library_says_which_torch_it_is_for():
    assert _native.torch_mismatch() == ""


def test_info():
    result = subprocess.run(
        [sys.executable, "-m", "lowtide", "info"], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert result.returncode == 0, result.stderr
    assert str(torch.__version__) in result.stdout
    assert lowtide.__version__ in result.stdout
    assert "works" in result.stdout
    if _native.cuda_device_count() == 0:
        assert "libcuda" in result.stdout or "no CUDA" in result.stdout


def test_paths():
    assert os.path.isfile(lowtide.library_path())
    assert lowtide.include_path.startswith(os.path.dirname(lowtide.library_path()))
    assert lowtide.cmake_prefix_path.startswith(os.path.dirname(lowtide.library_path()))


def test_names():
    assert set(lowtide.__all__) <= set(dir(lowtide))
    stubs = os.path.join(os.path.dirname(lowtide.__file__), "_native.pyi")
    with open(stubs) as file:
        text = file.read()
    for name in dir(_native):
        if not name.startswith("_"):
            assert f"def {name}(" in text or f"class {name}:" in text, f"{name} is missing in _native.pyi"
    for kind in (_native.Region, _native.StorageHandle):
        for name in vars(kind):
            if not name.startswith("_"):
                assert f"def {name}(" in text, f"{kind.__name__}.{name} is missing in _native.pyi"
