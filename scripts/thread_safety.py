#!/usr/bin/env python3
"""Checks the lock annotations (allocator/mutex.h) with clang's thread-safety analysis.

    python3 scripts/thread_safety.py <build folder>

Reads how each source of allocator/ and pool/ is compiled from the folder's compile_commands.json, and has clang look at it the same way,
without compiling. Ends with 1 where it finds something.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import shlex
import subprocess
import sys

ANALYSIS = ["-fsyntax-only", "-Wthread-safety", "-Wthread-safety-beta", "-Werror=thread-safety", "-Werror=thread-safety-beta"]
WITH_VALUE = {"-I", "-isystem", "-D"}


def flags_of(command: list[str]) -> list[str]:
    """Of a compiler's command, what decides how the source reads: paths, definitions, language."""
    flags = []
    for flag, value in zip(command, [*command[1:], ""]):
        if flag in WITH_VALUE:
            flags += [flag, value]
        elif flag.startswith(("-I", "-D", "-std=")):
            flags.append(flag)
    return flags


def check(entry: dict[str, str]) -> tuple[str, str]:
    """The file and what clang says about it; nothing if all is well."""
    command = [os.environ.get("CLANGXX", "clang++"), *flags_of(shlex.split(entry["command"])), *ANALYSIS, entry["file"]]
    result = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True)
    return entry["file"], result.stderr if result.returncode != 0 else ""


def main() -> int:
    """Checks every source; returns the exit status."""
    build = pathlib.Path(sys.argv[1])
    root = pathlib.Path(__file__).resolve().parent.parent
    folders = tuple(str(root / folder) + os.sep for folder in ("allocator", "pool"))
    entries = [e for e in json.loads((build / "compile_commands.json").read_text()) if e["file"].startswith(folders)]
    if not entries:
        print(f"{build} compiles no source of allocator/ and pool/", file=sys.stderr)
        return 1
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [(file, text) for file, text in pool.map(check, entries) if text]
    for file, text in found:
        print(f"{file}:\n{text}", file=sys.stderr)
    print(f"thread safety: {len(entries)} sources, {len(found)} with findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
