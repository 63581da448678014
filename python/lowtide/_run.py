"""``python -m lowtide run``: another program, with Lowtide as its allocator."""

import os
import shutil
import site
import sys
from typing import NoReturn

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(_PACKAGE)


def _reads_pth_files(folder: str) -> bool:
    """Whether interpreters read the .pth files of this folder when they start."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    return any(os.path.realpath(folder) == os.path.realpath(other) for other in folders)


def _environment(device: str) -> dict[str, str]:
    environment = {**os.environ, "LOWTIDE_INSTALL": device}
    if not (_reads_pth_files(_ROOT) and os.path.exists(os.path.join(_ROOT, "lowtide_startup.pth"))):
        paths = [os.path.join(_PACKAGE, "_startup"), _ROOT]
        if before := os.environ.get("PYTHONPATH"):
            paths.append(before)
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _arguments_of_python(program: list[str]) -> list[str]:
    """What follows ``python``: ``-m`` and ``-c`` as they are, a script, or a command's script found on the PATH."""
    name = program[0]
    if name.startswith("-") or os.path.exists(name):
        return program
    beside = os.path.join(os.path.dirname(sys.executable), name)
    script = beside if os.path.exists(beside) else shutil.which(name)
    if script is None:
        raise FileNotFoundError(f"there is no script and no command '{name}'")
    with open(script, "rb") as file:
        first = file.readline()
    if not first.startswith(b"#!") or b"python" not in first:
        raise ValueError(f"{script} is no Python script; LOWTIDE_INSTALL=1 in its environment reaches the Pythons it starts")
    return [script, *program[1:]]


def run(program: list[str], device: str) -> NoReturn:
    """Becomes ``program``, run by this Python; it and the Pythons it starts call ``lowtide.install(device)`` after torch.

    Args:
        program: As after ``python``: a script with arguments, ``-m module …``, or ``-c code …``; or a command that is
            a Python script, such as ``pytest``.
        device: As for :func:`lowtide.install`.

    Raises:
        FileNotFoundError, ValueError: There is no such program, or it is not Python's.
    """
    arguments = _arguments_of_python(program)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *arguments], _environment(device))
