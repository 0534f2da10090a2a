"""The loops of `jkv`, each jitted once: the cache donated, what is static named.

    cache, result = jkv.jitted.generate(model, params, cache, prompts, max_new_tokens=9)

They take and return what the functions of the same name do. The cache that was given is
gone afterwards, as its arrays are updated in place: go on with the one that comes back.
(`begin` and `score` keep theirs; `decode` takes the state that it is given, too.) A
model is static, so it must be hashable, and the same object from call to call. Lists of
token ids become arrays before they are traced, padded to the longest of them: only
another length, another number of prompts or another static argument compiles anew.
Integers of numpy with 64 bits are checked before JAX makes 32 of them. To donate
nothing, or to trace a loop inside a program of your own, take the function.

Example:
  >>> import jax, jkv
  >>> def count_on(params, tokens, cache, batch):
  ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache
  >>> cache = jkv.init(jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
  ...     num_blocks=8, block_size=4, max_sequences=2, max_context_length=16))
  >>> cache, result = jkv.jitted.generate(
  ...     count_on, None, cache, [[5, 6, 7], [40]], max_new_tokens=2)
  >>> result.tokens.tolist()
  [[8, 9], [41, 42]]
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

from jkv import decoding
from jkv.decoding.sampling.options import check_sampling
from jkv.decoding.speculation.options import check_speculation
from jkv.decoding.texts.prompts import as_stop_sequences, as_stop_tokens
from jkv.decoding.texts.text_tree import TextTree
from jkv.guards import explicit_transfers
from jkv.metadata.requests import as_domains, read_prompts, saturated

__all__ = ["beam_search", "begin", "decode", "extend", "generate", "prefill", "score"]

Loop = TypeVar("Loop", bound=Callable[..., Any])

# Arguments that shapes and programs depend on, of all loops.
STATIC = frozenset(
    {
        "model",
        "config",
        "steps",
        "max_new_tokens",
        "num_samples",
        "max_running",
        "chunk_size",
        "row_counts",
        "exact",
        "mesh",
        "heads",
        "num_beams",
        "num_return",
        "early_stopping",
    }
)
# How the host reads the arguments that are integers, before anything is traced: JAX
# would wrap what does not fit in 32 bits, and each number of a list would be an array
# of its own.
READERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(
        ("prompts", "tokens", "continuations"),
        lambda name, texts: read_prompts(texts, name),
    ),
    **dict.fromkeys(("seq_ids", "limits", "variants", "num_steps"), saturated),
    "salts": lambda name, salts: saturated(name, as_domains(name, salts)),
    "stop_tokens": lambda _, tokens: as_stop_tokens(tokens),
    "stop_sequences": lambda _, sequences: as_stop_sequences(sequences),
}
# Options that `jax.jit` would refuse in its own words, such as a class.
CHECKS = {"sampling": check_sampling, "speculate": check_speculation}


def _jit(loop: Loop, donated: tuple[str, ...] = ("cache",)) -> Loop:
    """Return a loop jitted, with the type and the documentation of the loop."""
    static = sorted(STATIC & {*inspect.signature(loop).parameters})
    jitted = jax.jit(loop, static_argnames=static, donate_argnames=donated)

    # Which has the fields as keyword arguments, none of which is required.
    written = inspect.signature(inspect.unwrap(loop))

    @functools.wraps(loop)
    def call(*args: Any, **options: Any) -> Any:
        given = written.bind(*args, **options)
        fields = given.arguments.get("fields", {})
        for arguments in (given.arguments, fields):
            for name, value in arguments.items():
                arguments[name] = _as_argument(name, value)
        with explicit_transfers():
            return jitted(*given.args, **given.kwargs)

    return cast(Loop, call)


def _as_argument(name: str, value: Any) -> Any:
    """Return an argument as `jax.jit` takes it, or refuse it in words."""
    if name in STATIC:
        return tuple(value) if isinstance(value, list | range) else value
    if name in CHECKS and value is not None:
        CHECKS[name](value)
    if name not in READERS or value is None or _has_arrays(value):
        return value
    return value if isinstance(value, TextTree) else READERS[name](name, value)


def _has_arrays(value: Any) -> bool:
    """Whether JAX's arrays are among the entries, whose values may not exist yet."""
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))


generate = _jit(decoding.generate)
extend = _jit(decoding.extend)
beam_search = _jit(decoding.beam_search)
score = _jit(decoding.score, donated=())
begin = _jit(decoding.begin, donated=())
prefill = _jit(decoding.prefill)
decode = _jit(decoding.decode, donated=("cache", "state"))
