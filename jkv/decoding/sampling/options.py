"""Sampling options of a generation, checked on construction."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jkv.arguments import explains_arguments
from jkv.status import UsageError

_MOST = int(jnp.iinfo(jnp.int32).max)

_LEAST = float(jnp.finfo(jnp.float32).tiny)

# Range of each field of `Sampling`: from, to, and a description.
_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, float("inf"), "0 (greedy) or more"),
    "top_k": (0, _MOST, "an integer of 0 (off) or more"),
    "top_p": (0.0, 1.0, "from 0 to 1 (off)"),
    "min_p": (0.0, 1.0, "from 0 (off) to 1"),
    "repetition_penalty": (_LEAST, float("inf"), "above 0; 1 is off"),
    "seeds": (-_MOST - 1, _MOST, "an integer of 32 bits"),
}


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sampling:
    """Sampling options; the default is greedy.

    With a temperature, repeated calls draw the same tokens: pass other `seeds`, or a
    `key`, for others.

    Every field is a scalar for all sequences, or an array or list with one value for
    each, and may be traced: changing a value never retraces. Numbers, lists and numpy
    arrays are checked on construction; JAX arrays, which may be traced, are not.
    The filters have the meaning and the order of Hugging Face's logits processors:
    repetition penalty, temperature, top-k, top-p, min-p. One difference: tokens with
    exactly equal logits are kept or removed together, by top-p too. The most likely
    token is always kept.

    Attributes:
      temperature: f32 [] or [B]. Logits are divided by it; 0 is greedy.
      top_k: i32 [] or [B]. Keep the `top_k` most likely tokens; 0 keeps all.
      top_p: f32 [] or [B]. Keep the most likely tokens up to this probability mass,
        including the token that crosses it; 1 keeps all.
      min_p: f32 [] or [B]. Keep tokens at least `min_p` times as likely as the most
        likely one; 0 keeps all.
      repetition_penalty: f32 [] or [B]. Logits of tokens seen in the prompt or the
        completion are divided by it if positive, multiplied if negative; 1 is off.
      seeds: i32 [] or [B]. A scalar is spread over the sequences (`spread_seeds`), the
        first of which gets the scalar itself.
      key: key [], of `jax.random.key`, instead of `seeds`: the first sequence's seed is
        drawn from it. It may be traced.

    Raises:
      ValueError: for a value outside of its field's range, or a key with seeds.

    Example:
      >>> import jkv
      >>> jkv.Sampling(temperature=0.8, top_p=0.95, seeds=7).top_p
      0.95
    """

    temperature: jax.Array | float = 0.0
    top_k: jax.Array | int = 0
    top_p: jax.Array | float = 1.0
    min_p: jax.Array | float = 0.0
    repetition_penalty: jax.Array | float = 1.0
    seeds: jax.Array | int = 0
    key: dataclasses.InitVar[jax.Array | None] = None
    # Dtype of each field inside the loops.
    dtypes: ClassVar[dict[str, type[np.generic]]] = {
        "temperature": np.float32,
        "top_k": np.int32,
        "top_p": np.float32,
        "min_p": np.float32,
        "repetition_penalty": np.float32,
        "seeds": np.int32,
    }

    def __post_init__(self, key: jax.Array | None) -> None:
        if key is not None:
            if not isinstance(self.seeds, int) or self.seeds != 0:
                raise ValueError("got seeds and key; pass one of them")
            object.__setattr__(self, "seeds", _draw_seed(key))
        for name in _RANGES:
            object.__setattr__(self, name, _checked(name, getattr(self, name)))

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        """Return the fields by name, for JAX."""
        names = [field.name for field in dataclasses.fields(self)]
        key = jax.tree_util.GetAttrKey
        return [(key(name), getattr(self, name)) for name in names], None

    @classmethod
    def tree_unflatten(cls, _: None, values: Any) -> "Sampling":
        """Rebuild the options unchecked: JAX also unflattens placeholders."""
        sampling = object.__new__(cls)
        for field, value in zip(dataclasses.fields(cls), values, strict=True):
            object.__setattr__(sampling, field.name, value)
        return sampling


def _checked(name: str, value: Any) -> Any:
    """Return the value of a field, lists as arrays, after a range check."""
    low, high, words = _RANGES[name]
    if isinstance(value, list | tuple):
        is_array = any(isinstance(leaf, jax.Array) for leaf in value)
        try:
            value = (jnp if is_array else np).asarray(value)
        except (TypeError, ValueError):
            raise UsageError(f"Sampling.{name} must be {words}, got {value}") from None
    if hasattr(value, "dtype") and not isinstance(value, np.ndarray | np.generic):
        return value  # a JAX array or a tracer
    given = np.asarray(value)
    kinds = (jnp.integer,) if isinstance(low, int) else (jnp.integer, jnp.floating)
    is_number = any(jnp.issubdtype(given.dtype, kind) for kind in kinds)
    if not is_number or not np.all(
        (given >= low) & (given <= high) & np.isfinite(given)
    ):
        raise UsageError(f"Sampling.{name} must be {words}, got {value!r}")
    return value


def _draw_seed(key: jax.Array) -> jax.Array:
    """Draw a seed from a key, i32[]."""
    is_array = isinstance(key, jax.Array)
    if not is_array or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise UsageError(
            f"Sampling.key must come from jax.random.key(...), got {key!r}; pass a "
            f"number as seeds"
        )
    return jax.random.randint(key, (), -_MOST - 1, _MOST, jnp.int32)


@explains_arguments
def spread_seeds(seed: Any, count: int) -> Any:
    """Return a seed for each sequence from a single number.

    The first is the number itself. The others hash it with the sequence's index, so
    that seeds 0, 1, 2, ... share no sequence. Sequence i alone is reproduced by
    `seeds=spread_seeds(seed, count)[i]`.

    Args:
      seed: i32[] or int; may be traced.
      count: number of sequences; static.

    Returns:
      i32[count], in numpy unless the seed is a JAX array.

    Raises:
      ValueError: for a seed that is not one number.

    Example:
      >>> from jkv.decoding import spread_seeds
      >>> spread_seeds(7, 3).tolist()
      [7, -2065701882, -506330980]
    """
    xp: Any = jnp if isinstance(seed, jax.Array) else np
    # The bits of a negative number, or of an unsigned one.
    first = xp.asarray(seed).reshape(1)
    first = first.astype(np.int64 if xp is np else first.dtype).astype(np.uint32)
    index = xp.arange(count, dtype=np.uint32)
    seeds = xp.where(index == 0, first, _mix(_mix(first) + index))
    return seeds.astype(np.uint32).view(np.int32)


def _mix(bits: Any) -> Any:
    """Hash u32[...], each bit depending on all (lowbias32 of C. Wellons, 2018)."""
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
    return bits ^ (bits >> np.uint32(16))


def check_sampling(sampling: object) -> None:
    if not isinstance(sampling, Sampling):
        raise UsageError(
            f"sampling must be a jkv.Sampling, such as Sampling(temperature=0.7), got "
            f"{sampling!r}"
        )


GREEDY = Sampling()
