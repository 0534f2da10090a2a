"""Imports point down: engine and decoding -> operations -> state."""

import ast
import pathlib

import jkv

PACKAGE = pathlib.Path(jkv.__file__).parent

# Each module, with the only modules of jkv it may import; lower ones first.
ALLOWED: dict[str, set[str]] = {
    "units": set(),
    "stages": set(),
    "status": set(),
    "huggingface": set(),
    "config": {"huggingface", "status", "units"},
    "plan": {"config", "huggingface", "units"},
    "quantization": {"config"},
    "state": {"config", "status", "units"},
    "counters": {"config", "stages", "state", "status"},
    "ring": {"state"},
    "requests": {"ring", "stages", "state", "status"},
    "invariants": {"config", "state", "status"},
    "statistics": {"counters", "state", "status", "units"},
    "attention": set(),
    "pool": {"counters", "ring", "state"},
    "prefix_index": {"counters", "state"},
    "copying": {"state"},
    "compaction": {"counters", "pool", "ring", "state", "statistics"},
    "resizing": {
        "compaction",
        "config",
        "counters",
        "prefix_index",
        "state",
        "units",
    },
    "allocation": {
        "copying",
        "counters",
        "pool",
        "prefix_index",
        "requests",
        "ring",
        "stages",
        "state",
        "status",
    },
    "appending": {
        "allocation",
        "config",
        "counters",
        "pool",
        "prefix_index",
        "quantization",
        "requests",
        "ring",
        "state",
        "status",
    },
    "sharing": {
        "allocation",
        "copying",
        "counters",
        "pool",
        "prefix_index",
        "requests",
        "ring",
        "state",
        "status",
    },
    "prefix": {
        "appending",
        "counters",
        "pool",
        "prefix_index",
        "requests",
        "ring",
        "state",
    },
    "lifetime": {"allocation", "counters", "requests", "state", "status"},
    "contents": {"state"},
    "transfer": {
        "allocation",
        "contents",
        "counters",
        "pool",
        "prefix_index",
        "requests",
        "ring",
        "state",
        "status",
    },
    "files": {"status"},
    "saving": {
        "config",
        "contents",
        "files",
        "invariants",
        "requests",
        "state",
        "status",
        "transfer",
    },
    "reading": {
        "appending",
        "attention",
        "config",
        "prefix_index",
        "quantization",
        "requests",
        "state",
    },
    "decoding": {
        "allocation",
        "appending",
        "prefix",
        "requests",
        "sharing",
        "state",
        "status",
    },
    "doctor": {
        "allocation",
        "appending",
        "attention",
        "config",
        "invariants",
        "quantization",
        "sharing",
        "state",
        "status",
    },
}


def imported_by(path: pathlib.Path) -> set[str]:
    """Return the modules of jkv that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules = {f"{node.module}.{a.name}" for a in node.names}
            found |= modules if node.module == "jkv" else {node.module or ""}
    return {name.split(".")[1] for name in found if name.startswith("jkv.")}


def test_imports_point_down() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if module == "__init__":
            continue
        above = imported_by(path) - ALLOWED[module] - {module}
        assert not above, f"{module} may not import {sorted(above)} ({path.name})"


def test_allowed_imports_have_no_cycle() -> None:
    below: set[str] = set()
    for module, imports in ALLOWED.items():
        assert imports <= below, f"{module} imports what stands below it in the list"
        below.add(module)


def test_only_runtime_packages_are_imported() -> None:
    allowed = {"jax", "jaxlib", "numpy", "chex", "jkv"}
    import sys

    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                top = name.split(".")[0]
                assert top in allowed or top in sys.stdlib_module_names, (path, name)
