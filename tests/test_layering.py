"""The floors: which package may import which, read from the source."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rlhfless", "sim", "backends", "traces", "experiments")

CORE_LIBRARIES = {"numpy", "msgspec"}
"""Besides the standard library, all that `rlhfless` may import."""
ONLY = {"simpy": "sim", "ray": "backends", "vllm": "backends", "torch": "backends"}
"""Libraries that one package alone may import."""

FLOOR_0 = ("rlhfless.units", "rlhfless.errors", "rlhfless.rng", "rlhfless.commands", "rlhfless.types")
FLOOR_1 = ("rlhfless.scheduler", "rlhfless.accounting")
ALLOWED: dict[str, tuple[str, ...]] = {
    "rlhfless.types": FLOOR_0,
    "rlhfless.scheduler": (*FLOOR_0, "rlhfless.scheduler"),
    "rlhfless.accounting": (*FLOOR_0, "rlhfless.accounting"),
    "rlhfless.executor": FLOOR_0,
    "rlhfless.driver": (*FLOOR_0, "rlhfless.executor", "rlhfless.scheduler.planner"),
    "rlhfless": FLOOR_0,
    "sim": (*FLOOR_0, "rlhfless.executor", "rlhfless.scheduler.migration", "sim"),
    "backends": (*FLOOR_0, "rlhfless.executor", "rlhfless.scheduler.migration", "backends"),
    "traces": (*FLOOR_0, "traces"),
    "experiments": PACKAGES,
}
"""What each room may import of the project. The longest matching name counts."""


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def imports(name: str, path: Path) -> set[str]:
    """Every module that `path` imports, anywhere in it; `from a import b` counts as a.b where that is a module."""
    known = {module for module, _ in modules()}
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            assert node.module is not None
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found.update(inner or {node.module})
    return found


def inside(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_module_keeps_its_floor(name: str, path: Path) -> None:
    room = max((room for room in ALLOWED if inside(name, room)), key=len)
    for imported in imports(name, path):
        top = imported.split(".")[0]
        if top in PACKAGES:
            allowed = any(inside(imported, each) for each in ALLOWED[room])
            assert allowed, f"{name} imports {imported}, which is not below it"
        if top in ONLY:
            assert inside(name, ONLY[top]), f"{name} imports {top}; only {ONLY[top]} may"
        if inside(name, "rlhfless"):
            known = top in sys.stdlib_module_names or top in CORE_LIBRARIES or top == "rlhfless"
            assert known, f"{name} imports {top}: the core has numpy, msgspec and the standard library"


def test_the_scheduler_never_sees_outcomes() -> None:
    """The oracle boundary, through any chain of imports inside the project."""
    graph = {name: imports(name, path) for name, path in modules()}
    for start in [name for name in graph if inside(name, "rlhfless.scheduler") or inside(name, "rlhfless.accounting")]:
        seen, left = set(), [start]
        while left:
            module = left.pop()
            assert module != "rlhfless.types.outcome", f"{start} reaches outcome"
            if module in graph and module not in seen:
                seen.add(module)
                left.extend(graph[module])


def test_nobody_imports_experiments() -> None:
    for name, path in modules():
        if not inside(name, "experiments"):
            assert not any(inside(imported, "experiments") for imported in imports(name, path)), name


def test_no_mode_flag() -> None:
    """One scheduler for both executors: no module asks whether it is being simulated."""
    for name, path in modules():
        if inside(name, "experiments"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name | ast.arg):
                label = node.id if isinstance(node, ast.Name) else node.arg
                assert label not in {"simulate", "simulated", "is_simulation", "dry_run"}, f"{name}: {label}"
