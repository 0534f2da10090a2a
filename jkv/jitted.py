"""The decoding loops of `jkv`, jitted, with donated caches.

    cache, result = jkv.jitted.generate(model, params, cache, prompts, max_new_tokens=9)

They have the arguments and results of the functions of the same name. The passed cache
is donated; continue with the returned one. (`begin` and `score` do not donate; `decode`
also donates its state.) The model is a static argument: it must be hashable, and the
same object in every call. Lists of token ids become arrays padded to the longest list,
so only a new length, number of prompts or static argument recompiles. 64-bit integers
of numpy are checked before JAX truncates them to 32 bits. To avoid donation, or to call
a loop inside another jitted function, use the original function.

Example:
  >>> import jax, jkv
  >>> def count_on(params, tokens, cache, batch):
  ...     return jax.nn.one_hot(tokens + 1, 100)[batch.last_rows], cache
  >>> cache = jkv.init(jkv.CacheConfig.toy())
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
from jkv.arguments import explicit_transfers, saturated
from jkv.decoding.model.drafter import check_drafter
from jkv.decoding.sampling.draws import check_sampling
from jkv.decoding.sequences.prompts import as_stop_sequences, as_stop_tokens
from jkv.decoding.sequences.trajectory_tree import TrajectoryTree
from jkv.metadata.requests import as_salts, read_prompts

__all__ = ["beam_search", "begin", "decode", "extend", "generate", "prefill", "score"]

Loop = TypeVar("Loop", bound=Callable[..., Any])

# Arguments of the loops that determine shapes or programs.
STATIC = frozenset(
    {
        "model",
        "config",
        "generation_config",
        "max_new_tokens",
        "num_samples",
        "max_running",
        "chunk_size",
        "row_counts",
        "exact",
        "roll",
        "press",
        "budget",
        "max_span",
        "cacheable_spans",
        "extra_ids",
        "mesh",
        "heads",
        "num_beams",
        "num_return",
        "early_stopping",
    }
)
# Conversions of integer arguments before tracing: JAX would wrap 64-bit numbers, and
# trace each number of a list as an array of its own.
READERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(
        ("prompts", "tokens", "continuations", "spans"),
        lambda name, rows: read_prompts(rows, name),
    ),
    **dict.fromkeys(("seq_ids", "limits", "variants", "num_steps"), saturated),
    "salts": lambda name, salts: saturated(name, as_salts(name, salts)),
    "stop_tokens": lambda _, tokens: as_stop_tokens(tokens),
    "stop_sequences": lambda _, sequences: as_stop_sequences(sequences),
}
# Validators of options for which `jax.jit` has unclear error messages.
CHECKS = {"sampling": check_sampling, "speculate": check_drafter}


def _jit(loop: Loop, donated: tuple[str, ...] = ("cache",)) -> Loop:
    """Jit a loop, keeping its type and documentation."""
    static = sorted(STATIC & {*inspect.signature(loop).parameters})
    jitted = jax.jit(loop, static_argnames=static, donate_argnames=donated)

    # The unwrapped signature has optional keyword arguments for all fields.
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
    """Convert an argument for `jax.jit`, or raise a descriptive error."""
    if name in STATIC:
        return tuple(value) if isinstance(value, list | range) else value
    if name in CHECKS and value is not None:
        CHECKS[name](value)
    if name not in READERS or value is None or _has_arrays(value):
        return value
    return value if isinstance(value, TrajectoryTree) else READERS[name](name, value)


def _has_arrays(value: Any) -> bool:
    """Return True if any leaf is a JAX array, possibly without a value yet."""
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))


generate = _jit(decoding.generate)
extend = _jit(decoding.extend)
beam_search = _jit(decoding.beam_search)
score = _jit(decoding.score, donated=())
begin = _jit(decoding.begin, donated=())
prefill = _jit(decoding.prefill)
decode = _jit(decoding.decode, donated=("cache", "state"))
