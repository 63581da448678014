"""Programs that know nothing of Lowtide run under it: ``python -m lowtide run`` and LOWTIDE_INSTALL."""

import os
import subprocess
import sys
from pathlib import Path

import lowtide
import pytest

PACKAGE = Path(lowtide.__file__).parent
STARTUP = PACKAGE / "_startup"
REPORT = "import torch, sys; print(sys.modules['lowtide'].installed() if 'lowtide' in sys.modules else 'absent')"


@pytest.fixture
def environment():
    """One in which interpreters read what Lowtide has for their start, wherever this copy is."""
    paths = [str(STARTUP), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    cleared = {name: value for name, value in os.environ.items() if name != "LOWTIDE_INSTALL"}
    return {**cleared, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def python(*arguments, env=None, code=0, cwd=None):
    result = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=120, env=env, cwd=cwd
    )
    assert result.returncode == code, f"{result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


def run(*arguments, **options):
    return python("-m", "lowtide", "run", "--device", lowtide.installed(), *arguments, **options)


def test_a_script_with_arguments(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(f"{REPORT}\nprint(__name__, sys.argv[1:], sys.path[0])\n")
    out = run(script, "--device", "x", "-m").stdout.splitlines()
    assert out[0] == lowtide.installed()
    assert out[1].startswith("__main__ ['--device', 'x', '-m']")


def test_code_and_modules(tmp_path):
    assert run("-c", REPORT).stdout.strip() == lowtide.installed()
    (tmp_path / "some_module.py").write_text(REPORT)
    assert run("-m", "some_module", cwd=tmp_path).stdout.strip() == lowtide.installed()


def test_children_too(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import multiprocessing, subprocess, sys\n"
        "def child(queue):\n"
        f"    import torch; queue.put(sys.modules['lowtide'].installed())\n"
        "if __name__ == '__main__':\n"
        f"    print(subprocess.check_output([sys.executable, '-c', {REPORT!r}], text=True).strip())\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.SimpleQueue()\n"
        "    process = context.Process(target=child, args=(queue,))\n"
        "    process.start(); print(queue.get()); process.join()\n"
    )
    assert run(script).stdout.split() == [lowtide.installed()] * 2


def test_pytest(tmp_path):
    (tmp_path / "test_under_lowtide.py").write_text(
        "import sys, torch\n"
        "def test_installed():\n"
        f"    assert sys.modules['lowtide'].installed() == '{lowtide.installed()}'\n"
    )
    for program in (["-m", "pytest"], ["pytest"]):
        if program == ["pytest"] and not (Path(sys.executable).parent / "pytest").exists():
            continue
        assert "1 passed" in run(*program, "-q", "-p", "no:cacheprovider", tmp_path / "test_under_lowtide.py").stdout


def test_the_exit_status_is_the_programs(tmp_path):
    run("-c", "raise SystemExit(7)", code=7)


def test_what_cannot_be_run_is_named():
    assert "no command 'no such program'" in run("no such program", code=2).stderr
    assert "no Python script" in run("true", code=2).stderr
    assert "name the program" in run(code=2).stderr


def test_a_program_without_torch_does_not_import_it():
    assert run("-c", "import sys; print('torch' in sys.modules, 'lowtide' in sys.modules)").stdout.split() == ["False"] * 2


@pytest.mark.parametrize("value", ["1", "auto"])
def test_the_variable(environment, value):
    out = python("-c", REPORT, env={**environment, "LOWTIDE_INSTALL": value}).stdout
    assert out.strip() in ("host", "cuda")


@pytest.mark.parametrize("value", [None, "", "0"])
def test_the_variable_unset(environment, value):
    added = {} if value is None else {"LOWTIDE_INSTALL": value}
    assert python("-c", REPORT, env={**environment, **added}).stdout.strip() == "absent"


def test_lowtide_imported_first(environment):
    out = python("-c", "import lowtide; print(lowtide.installed())", env={**environment, "LOWTIDE_INSTALL": "host"}).stdout
    assert out.strip() == "host"


def test_a_device_that_is_not_there_is_named(environment):
    result = python("-c", "import torch", env={**environment, "LOWTIDE_INSTALL": "abacus"}, code=1)
    assert "ImportError: LOWTIDE_INSTALL=abacus asks for Lowtide in this process" in result.stderr


def test_a_sitecustomize_of_the_users_still_runs(environment, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.of_the_user = 5")
    env = {**environment, "LOWTIDE_INSTALL": "host"}
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    assert python("-c", f"print(of_the_user); {REPORT}", env=env).stdout.split() == ["5", "host"]


def test_the_installed_package_needs_no_path():
    if not (PACKAGE.parent / "lowtide_startup.pth").exists() or "site-packages" not in str(PACKAGE):
        pytest.skip("this lowtide is a build tree, whose .pth file no interpreter reads")
    env = {**os.environ, "LOWTIDE_INSTALL": "host"}
    env.pop("PYTHONPATH", None)
    assert python("-c", REPORT, env=env).stdout.strip() == "host"
