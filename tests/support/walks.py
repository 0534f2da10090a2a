"""List the functions of jkv that run behind each entry point, first calls included.

    python tests/support/walks.py [DOOR]      files and lines, or the files of one door

It counts executed functions, not imports. `list_walks` returns the executed lines of
each file; it runs in a separate process, as traces of earlier calls are not repeated.
"""

import json
import pathlib
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv
import jkv.jitted  # imports are not counted
from jkv.grammar import Vocabulary, from_json_schema
from jkv.serving import Engine

for _package in (jkv, jkv.decoding):  # some names are imported on first use
    for _name in _package.__all__:
        getattr(_package, _name)

PACKAGE = pathlib.Path(jkv.__file__).parent
SIZES = dict(
    num_layers=1,
    num_kv_heads=2,
    head_dim=16,
    num_blocks=32,
    block_size=4,
    max_sequences=4,
    max_context_length=32,
)
ROWS = np.ones((2, 2, 16), np.float32)
QUERIES = np.ones((2, 4, 16), np.float32)


def make_cache() -> jkv.Cache:
    """Create a plain cache."""
    return jkv.init(jkv.CacheConfig(**SIZES))


def fill() -> tuple[jkv.Cache, Any, jkv.Batch]:
    """Write one token of two sequences."""
    cache, opened = jkv.allocate(make_cache(), [0, 0])
    cache, batch = jkv.append(cache, opened.seq_ids)
    rows = jnp.asarray(ROWS)
    return jkv.write(cache, 0, batch, rows, rows), opened, batch


def call_verbs() -> None:
    """Call the nine verbs of a cache's life."""
    cache, opened, batch = fill()
    jkv.attend(cache, 0, batch, jnp.asarray(QUERIES))
    cache = jkv.commit(cache, batch)
    cache, forked = jkv.fork(cache, opened.seq_ids[:1])
    cache, _ = jkv.truncate(cache, forked.seq_ids, 0)
    jkv.free(cache, opened.seq_ids)


def count_on(
    params: Any,
    tokens: jax.Array,
    cache: jkv.Cache,
    batch: jkv.Batch,
    *,
    all_rows: bool = False,
) -> tuple[jax.Array, jkv.Cache]:
    """Return logits of the next number; a model without attention."""
    del params
    logits = jax.nn.one_hot((tokens + 1) % 50, 50)
    return (logits if all_rows else logits[batch.last_rows]), cache


def generate() -> None:
    """Continue a prompt."""
    jkv.generate(count_on, None, make_cache(), np.array([[1, 2, 3]]), max_new_tokens=4)


def serve() -> None:
    """Serve a request, from submission to result."""
    engine = Engine(
        count_on,
        None,
        make_cache(),
        max_running=2,
        max_new_tokens=6,
        max_prompt_tokens=8,
    )
    engine.generate([[1, 2, 3]], max_new_tokens=4)
    engine.close()


def compile_schema() -> None:
    """Compile a schema of an object."""
    tokens = [bytes([i]) for i in range(256)]
    vocabulary = Vocabulary([*tokens, None], end_tokens=[256])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    from_json_schema(schema | {"required": ["a"]}, vocabulary)


def list_walks() -> dict[str, dict[str, int]]:
    """Return the lines of the executed functions in each file, for each entry point."""
    ran: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            ran.add(frame.f_code)

    def walk(door: Callable[[], None]) -> dict[str, int]:
        ran.clear()
        jax.clear_caches()
        sys.setprofile(note)
        try:
            door()
        finally:
            sys.setprofile(None)
        found: dict[str, int] = {}
        for code in ran:
            if not code.co_name.startswith("<"):  # comprehensions and modules
                name = pathlib.Path(code.co_filename).relative_to(PACKAGE).as_posix()
                found[name] = found.get(name, 0) + _count_lines(code)
        return found

    threading.setprofile(note)
    cache, _, batch = fill()
    doors = {
        "verbs": call_verbs,
        "attend": lambda: jkv.attend(cache, 0, batch, jnp.asarray(QUERIES)),
        "generate": generate,
        "engine": serve,
        "schema": compile_schema,
    }
    return {name: walk(door) for name, door in doors.items()}


def _count_lines(code: CodeType) -> int:
    lines = [line for *_, line in code.co_lines() if line]
    return max(lines, default=code.co_firstlineno) - code.co_firstlineno + 1


if __name__ == "__main__":
    walks = list_walks()
    if sys.argv[1:] == ["--json"]:
        print(json.dumps(walks))
    for door, files in walks.items():
        if sys.argv[1:] == [door]:
            for name in sorted(files, key=lambda each: -files[each]):
                print(f"{files[name]:6d}  {name}")
        elif not sys.argv[1:]:
            print(f"{door:10s} {len(files):4d} files {sum(files.values()):6d} lines")
