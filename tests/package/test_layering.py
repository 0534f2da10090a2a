"""Imports point down: each package may import the ones below it, and no other."""

import ast
import functools
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

import jkv

pytestmark = pytest.mark.one_end
PACKAGE = pathlib.Path(jkv.__file__).parent

# Packages from the bottom up, with the others that each may import.
ALLOWED: dict[str, set[str]] = {
    "status": set(),
    "signatures": set(),
    "operations": set(),
    "arguments": {"signatures", "status"},
    "masks": {"arguments", "operations"},
    "lazy": set(),
    "xla_flags": set(),
    "logits_processors": {"arguments", "signatures", "status"},
    "grammar": {"arguments", "signatures", "status", "logits_processors"},
    "sharding": {"operations"},
    "formats": set(),
    "attention": {
        "arguments",
        "formats",
        "operations",
        "masks",
        "sharding",
        "signatures",
        "xla_flags",
    },
    "recurrence": {"operations"},
    "config": {"arguments", "formats", "lazy", "sharding", "status"},
    "state": {
        "arguments",
        "config",
        "formats",
        "operations",
        "sharding",
        "signatures",
        "status",
    },
    "metadata": {"arguments", "operations", "signatures", "state", "status"},
    "blocks": {
        "attention",
        "formats",
        "operations",
        "metadata",
        "sharding",
        "state",
        "status",
    },
    "storage": {
        "blocks",
        "config",
        "formats",
        "operations",
        "metadata",
        "sharding",
        "state",
        "status",
    },
    "verbs": {
        "arguments",
        "attention",
        "blocks",
        "config",
        "formats",
        "operations",
        "masks",
        "metadata",
        "sharding",
        "state",
        "status",
        "storage",
    },
    # Optional parts of a cache.
    "states": {
        "arguments",
        "formats",
        "operations",
        "metadata",
        "recurrence",
        "sharding",
        "state",
        "status",
    },
    "prefixes": {
        "arguments",
        "config",
        "operations",
        "metadata",
        "state",
        "status",
        "verbs",
    },
    "inspection": {"config", "prefixes", "state", "status"},
    "tiers": {
        "arguments",
        "blocks",
        "config",
        "metadata",
        "operations",
        "prefixes",
        "sharding",
        "state",
        "status",
        "storage",
    },
    "making": {
        "arguments",
        "blocks",
        "config",
        "formats",
        "inspection",
        "metadata",
        "prefixes",
        "sharding",
        "state",
        "states",
        "status",
        "storage",
        "verbs",
    },
    "adapters": {"arguments", "operations", "metadata", "state", "status", "verbs"},
    "press": {"arguments", "metadata", "status"},
    "decoding": {
        "arguments",
        "config",
        "operations",
        "lazy",
        "logits_processors",
        "making",
        "masks",
        "metadata",
        "press",
        "sharding",
        "signatures",
        "state",
        "states",
        "status",
        "verbs",
    },
    "drafters": {
        "config",
        "decoding",
        "operations",
        "metadata",
        "masks",
        "state",
        "status",
        "verbs",
    },
    "jitted": {"arguments", "decoding", "metadata"},
    "trees": {"arguments", "decoding", "metadata", "signatures", "status", "verbs"},
    "serialization": {
        "attention",
        "decoding",
        "masks",
        "prefixes",
        "state",
        "status",
        "verbs",
    },
    "commands": {
        "arguments",
        "attention",
        "config",
        "formats",
        "inspection",
        "making",
        "state",
        "status",
        "storage",
        "verbs",
        "xla_flags",
    },
    "serving": {
        "arguments",
        "blocks",
        "commands",
        "decoding",
        "inspection",
        "metadata",
        "prefixes",
        "sharding",
        "signatures",
        "state",
        "status",
        "logits_processors",
        "storage",
        "tiers",
        "verbs",
    },
    # Each folder imports one trainer or engine, and nothing else imports the folder.
    "integrations": {"decoding"},
    # Commands for `python -m`.
    "__main__": set(),
    "doctor": {"commands"},
    "plan": {"commands"},
}
# Packages that users of the cache read: they use group kinds only through interfaces.
CORE = {
    *("operations", "lazy"),
    *(
        "status",
        "signatures",
        "arguments",
        "sharding",
        "formats",
        "masks",
        "attention",
    ),
    *("config", "state", "metadata", "blocks", "storage", "verbs"),
    "xla_flags",
}
# Public modules of packages with many, bottom up; each may import the ones before it.
DOORS: dict[str, tuple[str, ...]] = {
    "decoding": (
        "sequences",
        "model",
        "sampling",
        "scheduler",
        "speculation",
        "arguments",
        "beams",
        "scoring",
        "extension",
        "generation",
        "exactness",
        "format_accuracy",
    ),
    "attention.kernel": (
        *("triton", "backend", "elements", "tiles", "work", "bodies", "launches"),
        "interface",
    ),
    "serving": ("request", "device", "scheduler", "prometheus", "engine"),
}
# Products that import others, and the maximum number of inner modules: package names
# are free. Lower the numbers with the code, and never raise them.
INNER: dict[tuple[str, str], int] = {
    ("jkv/serving", "decoding"): 0,
    ("jkv/serving", "commands inspection prefixes tiers"): 1,
    ("examples", "*"): 0,
}
# Packages and modules that any other may import.
OPEN = {
    *("jkv", "jkv.config", "jkv.decoding", "jkv.grammar", "jkv.integrations.tunix"),
    "jkv.drafters",
    *("jkv.jitted", "jkv.logits_processors", "jkv.recurrence", "jkv.serialization"),
    *("jkv.serving", "jkv.serving.prometheus", "jkv.trees"),
    *("jkv.commands", "jkv.inspection", "jkv.prefixes", "jkv.tiers"),
}
RUN_TIME = {"jax", "jaxlib", "numpy", "chex", "jkv"}
# Packages of the extras, and the only file that imports each.
EXTRAS = {
    "prometheus_client": "serving/prometheus.py",
}
BROUGHT = {"tunix": {"tunix", "flax"}}  # by the extra of each integration


def name_room(module: str) -> str:
    return module.split(".")[1]


@functools.cache
def find_imports(path: pathlib.Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Return a file's imports at any depth, without imports for type checkers."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    nodes = ast.walk(tree)
    return tuple(n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom))


@functools.cache
def imported_modules(path: pathlib.Path) -> frozenset[str]:
    """Return the names of all modules that a file imports."""
    found: set[str] = set()
    for node in find_imports(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path}: relative import"
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= modules if node.module == "jkv" else {node.module or ""}
    return frozenset(found)


def test_imports_between_packages_point_down() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if room == "__init__":
            continue
        names = imported_modules(path)
        rooms = {name.split(".")[1] for name in names if name.startswith("jkv.")}
        above = rooms - ALLOWED[room] - {room}
        assert not above, f"{room} may not import {sorted(above)} ({path.name})"


def test_the_list_is_ordered() -> None:
    below: set[str] = set()
    for room, imports in ALLOWED.items():
        assert imports <= below, f"{room} imports what stands below it in the list"
        below.add(room)


def test_the_core_imports_nothing_else() -> None:
    for room in CORE:
        assert ALLOWED[room] <= CORE, room


@pytest.mark.parametrize("room", DOORS)
def test_imports_within_packages_point_down(room: str) -> None:
    order = {f"jkv.{room}.{door}": rank for rank, door in enumerate(DOORS[room])}
    folder, depth = PACKAGE / room.replace(".", "/"), len(room.split(".")) + 2
    paths = sorted(folder.rglob("*.py"))
    doors = [path.relative_to(folder).with_suffix("").parts[0] for path in paths]
    assert set(doors) - {"__init__"} == set(DOORS[room])
    for path, door in zip(paths, doors, strict=True):
        if door == "__init__":
            continue
        rank = order[f"jkv.{room}.{door}"]
        used = {".".join(name.split(".")[:depth]) for name in imported_modules(path)}
        above = {name for name in used if order.get(name, -1) > rank}
        assert not above, f"{door} may not import {sorted(above)} ({path.name})"


@pytest.mark.parametrize("folder, products", INNER)
def test_products_import_others_by_their_packages(folder: str, products: str) -> None:
    inner = {
        name
        for path in (PACKAGE.parent / folder).rglob("*.py")
        for name in named_modules(path)
        if name.startswith("jkv.") and name not in OPEN
        if products == "*" or name_room(name) in products.split()
    }
    assert len(inner) <= INNER[folder, products], sorted(inner)


def named_modules(path: pathlib.Path) -> set[str]:
    """Return the modules named in a file's absolute imports."""
    found: set[str] = set()
    for node in find_imports(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.level == 0:
            found.add(node.module or "")
    return found


def test_check_shares_no_code_with_the_verbs() -> None:
    names = "invariants", "recount", "block_invariants", "index_invariants"
    for name in names:
        used = imported_modules(PACKAGE / "inspection" / f"{name}.py")
        used -= {"jkv.prefixes.arrays"}
        assert not any(module.startswith("jkv.metadata") for module in used), name


def test_packages_have_no_import_cycles() -> None:
    for room in ALLOWED:
        files = sorted(PACKAGE.glob(f"{room}/**/*.py"))
        below = {
            ".".join(("jkv", *path.relative_to(PACKAGE).with_suffix("").parts)): path
            for path in files
            if path.name != "__init__.py"
        }
        while below:
            free = [
                name
                for name, path in below.items()
                if not any(
                    used == other or used.startswith(f"{other}.")
                    for used in _with_members(path)
                    for other in below
                    if other != name
                )
            ]
            assert free, f"modules of {room} import each other: {sorted(below)}"
            for name in free:
                del below[name]


def test_loops_work_inside_shard_map() -> None:
    """Loops of `lax` are only for `jkv.operations`, and for code outside a step."""
    kernels = (
        *("isolation", "join", "query_gradients", "scores", "token_gradients"),
        "walk",
    )
    bodies = "attention/kernel/bodies"
    own = {"operations.py", *(f"{bodies}/{name}.py" for name in kernels)}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name not in own and not name.startswith("commands/"):
            assert not re.search(r"lax\.(fori|while)_loop\(", path.read_text()), name


@functools.cache
def _with_members(path: pathlib.Path) -> frozenset[str]:
    """Return the modules that a file imports, including members of one by name."""
    found = {*imported_modules(path)}
    for node in find_imports(path):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def test_the_package_imports_little_besides_jax() -> None:
    """Neither chex, which assertions need, nor Pallas, which kernels need on a GPU."""
    program = """
import sys
import jax
before = set(sys.modules)
import jkv
found = set(sys.modules) - before
own = [name for name in found if name.startswith("jkv")]
import jax.numpy as jnp
config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=4,
                         max_sequences=2, max_context_length=16)
def step(rows):
    cache, batch = jkv.append(jkv.init(config), [0])
    return jkv.attend(cache, 0, batch, rows)
jax.eval_shape(step, jnp.ones((1, 1, 8)))
print(*(name for name in found if not name.startswith("jkv")))
print(*(name for name in sys.modules if name.startswith("jax.experimental.pallas")))
print(*own)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    imported, after_a_trace = ran.stdout.split("\n")[:2]
    assert "jkv.integrations" not in ran.stdout.split("\n")[2]
    assert "chex" not in imported and "jax.experimental.pallas" not in imported
    assert len(imported.split()) < 60, imported
    own = [name for name in ran.stdout.split("\n")[2].split() if name != "jkv"]
    assert not {*map(name_room, own)} & {
        "inspection",
        "making",
        "logits_processors",
        "trees",
    }
    assert after_a_trace == ""


def test_only_runtime_packages_are_imported() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in imported_modules(path):
            top = name.split(".")[0]
            parts = path.relative_to(PACKAGE).parts
            is_integration = parts[0] == "integrations" and len(parts) > 2
            known = RUN_TIME | (BROUGHT[parts[1]] if is_integration else set())
            if EXTRAS.get(top) == "/".join(parts):
                known = known | {top}
            assert top in known or top in sys.stdlib_module_names, (path, name)


@pytest.mark.parametrize("package", ["", "config", "decoding"])
def test_lazy_names_equal_the_type_checked_imports(package: str) -> None:
    path = PACKAGE / package / "__init__.py"
    checked: dict[str, str] = {}
    for block in ast.parse(path.read_text()).body:
        if isinstance(block, ast.If):
            for each in block.body:
                assert isinstance(each, ast.ImportFrom)
                names = [alias.name for alias in each.names]
                checked |= dict.fromkeys(names, str(each.module))
    (call,) = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "imports_later"
    )
    homes = ast.literal_eval(call.args[1])
    later = {name: home for home, names in homes.items() for name in names.split()}
    assert later == {name: home for name, home in checked.items() if home != "jkv"}
    assert later.keys() <= {
        *importlib.import_module(f"jkv.{package}".strip(".")).__all__
    }
