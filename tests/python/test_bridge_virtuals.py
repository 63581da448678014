"""Every virtual function of torch's allocator classes is either overridden by the bridge or on a short list here.

`override` makes the compiler find functions that went away or changed; this finds those that came, whose default would
silently do nothing, or raise, where torch's own allocator does something.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BRIDGE = REPOSITORY / "allocator" / "torch"

# Functions whose default is what is wanted, with the reason.
WANTED_DEFAULTS: dict[str, dict[str, str]] = {
    "TorchCudaAllocator": {},
    "HostBridge": {},
}

# Where torch declares each class.
DECLARED_IN = {
    "Allocator": "c10/core/Allocator.h",
    "DeviceAllocator": "c10/core/CachingDeviceAllocator.h",
    "CUDAAllocator": "c10/cuda/CUDACachingAllocator.h",
}

BRIDGES = {
    "TorchCudaAllocator": ("cuda_bridge.h", ("Allocator", "DeviceAllocator", "CUDAAllocator")),
    "HostBridge": ("host_bridge.h", ("Allocator",)),
}


def torch_include() -> Path:
    # Located, not imported: the headers are what matters.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("needs an installed torch")
    include = Path(spec.origin).parent / "include"
    if not include.is_dir():
        pytest.skip("needs a torch with C++ headers")
    return include


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def class_body(text: str, name: str) -> str:
    """The text between the braces of class `name`."""
    head = re.search(rf"\b(?:class|struct)\s+(?:C10\w*API\s+)?{name}\b(?:\s+final)?[^;{{(]*\{{", text)
    assert head is not None, f"class {name} is not where it was; this test has to be taught where it went"
    depth = 1
    end = head.end()
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[head.end() : end - 1]


def outermost(body: str) -> str:
    """`body` without the bodies of its functions, each of which becomes ';'."""
    out = []
    depth = 0
    for character in body:
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                out.append(";")
        elif depth == 0:
            out.append(character)
    return "".join(out)


def parameters(declaration: str, start: int) -> str:
    """The text between the parenthesis at `start` and the one that closes it."""
    depth = 0
    for position in range(start, len(declaration)):
        depth += {"(": 1, ")": -1}.get(declaration[position], 0)
        if depth == 0:
            return declaration[start + 1 : position]
    raise AssertionError(f"unbalanced parentheses: {declaration}")


def arity(parameter_text: str) -> int:
    """The number of parameters, where commas within brackets separate none."""
    if not parameter_text.strip():
        return 0
    depth = 0
    count = 1
    for character in parameter_text:
        depth += {"(": 1, "<": 1, "{": 1, ")": -1, ">": -1, "}": -1}.get(character, 0)
        count += character == "," and depth == 0
    return count


def signatures(body: str, keyword: str) -> set[str]:
    """Functions of a class body whose declaration has `keyword`, as name/number of parameters."""
    found = set()
    # Default arguments in braces would look like bodies.
    body = outermost(re.sub(r"=\s*\{[^{}]*\}", "", body))
    for declaration in re.split(r";|^\s*(?:public|private|protected)\s*:|^\s*#[^\n]*", body, flags=re.MULTILINE):
        if not re.search(rf"\b{keyword}\b", declaration) or "~" in declaration:
            continue
        name = re.search(r"(\w+)\s*\(", declaration)
        assert name is not None, declaration
        found.add(f"{name.group(1)}/{arity(parameters(declaration, name.end() - 1))}")
    return found


@pytest.mark.parametrize("bridge", BRIDGES)
def test_every_virtual_is_overridden_or_wanted(bridge: str) -> None:
    include = torch_include()
    header, bases = BRIDGES[bridge]
    declared: set[str] = set()
    for base in bases:
        text = without_comments((include / DECLARED_IN[base]).read_text())
        declared |= signatures(class_body(text, base), "virtual")
    ours = without_comments((BRIDGE / header).read_text())
    overridden = signatures(class_body(ours, bridge), "override")
    missing = sorted(declared - overridden - WANTED_DEFAULTS[bridge].keys())
    assert not missing, f"{bridge} in allocator/torch/{header} neither overrides nor lists: {', '.join(missing)}"


def test_the_search_finds_what_is_known_to_be_there() -> None:
    text = without_comments((torch_include() / DECLARED_IN["CUDAAllocator"]).read_text())
    found = signatures(class_body(text, "CUDAAllocator"), "virtual")
    assert {"raw_alloc/1", "memcpyAsync/7", "beginAllocateToPool/3", "createOrIncrefPool/3", "name/0"} <= found
    assert len(found) > 35


def test_wanted_defaults_are_not_overridden() -> None:
    for bridge, (header, _) in BRIDGES.items():
        overridden = signatures(class_body(without_comments((BRIDGE / header).read_text()), bridge), "override")
        stale = sorted(overridden & WANTED_DEFAULTS[bridge].keys())
        assert not stale, f"overridden by now, so no default: {', '.join(stale)}"
