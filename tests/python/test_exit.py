"""The process ends cleanly, whatever is alive and wherever the bytes are."""

import pytest
from lowtide_testing import on_host, run_script

WAYS = ["end", "sys.exit", "os._exit", "daemon thread", "thread", "inside", "SIGTERM"]


@pytest.mark.parametrize("way", WAYS)
def test_exit(way):
    run_script("exit.py", way, timeout=30)


def test_exit_by_an_exception():
    result = run_script("exit.py", "exception", timeout=30, check=False)
    assert result.returncode == 1
    assert "ValueError: on purpose" in result.stderr
    assert result.stderr.strip().splitlines()[-1] == "ValueError: on purpose"


def test_fork():
    run_script("fork.py", timeout=30)


def test_fork_beside_transfers():
    if not on_host():
        pytest.skip("the child of a process that uses CUDA may not use it; what it may is in fork.py")
    run_script("fork_beside_transfers.py", timeout=120)
