"""Convert a `RolloutConfig` to jkv's options; raise for unsupported ones."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tunix.rl.rollout.base_rollout import RolloutConfig

import jkv

_READ = {
    "max_tokens_to_generate",
    "max_prompt_length",
    "return_logprobs",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "eos_tokens",
    "data_type",
    # Used only by tunix's vanilla engine: there is no dense cache to size.
    "kv_cache_size",
}


class CallOptions(NamedTuple):
    """Options of one call."""

    max_new_tokens: int
    max_prompt_length: int
    is_greedy: bool
    temperature: float  # 1 if greedy
    top_p: float
    top_k: int  # 0 for no limit
    stop_tokens: tuple[int, ...]
    key: jax.Array  # key[], of the run
    wants_logprobs: bool


def read_options(
    config: RolloutConfig,
    eos_id: int,  # end token if `eos_tokens` is None
) -> CallOptions:
    """Return the options of one call.

    They mean the same as in tunix's vanilla engine: without `top_p` decoding is greedy,
    at any temperature; a `top_k` below 1 is no limit; the default seed is 0. A
    temperature of 0 is greedy too, as `RolloutConfig` documents.
    """
    check_options(config)
    is_greedy = config.top_p is None or config.temperature == 0
    sampling = jkv.Sampling(  # validates the numbers
        temperature=config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=max(config.top_k or 0, 0),
    )
    return CallOptions(
        max_new_tokens=config.max_tokens_to_generate,
        max_prompt_length=config.max_prompt_length,
        is_greedy=is_greedy,
        temperature=1.0 if is_greedy else float(sampling.temperature),
        top_p=float(sampling.top_p),
        top_k=int(sampling.top_k),
        stop_tokens=tuple(config.eos_tokens or [eos_id]),
        key=_read_seed(config.seed),
        wants_logprobs=config.return_logprobs,
    )


def check_options(config: RolloutConfig) -> None:
    refused = [
        field.name
        for field in dataclasses.fields(config)
        if field.name not in _READ and getattr(config, field.name) != _default_of(field)
    ]
    if refused:
        raise ValueError(
            f"RolloutConfig.{', '.join(refused)} is not supported by JkvRollout; keep "
            f"the default. It runs on the mesh of the role, and its cache is sized by "
            f"its own arguments (functools.partial(JkvRollout, num_blocks=...))"
        )


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _read_seed(seed: Any) -> jax.Array:
    """Return a key from a number, a typed or legacy key, or 0 for None."""
    if seed is None or jnp.ndim(seed) == 0 and not _is_key(seed):
        return jax.random.key(0 if seed is None else seed)
    return seed if _is_key(seed) else jax.random.wrap_key_data(seed)


def _is_key(seed: Any) -> bool:
    dtype = getattr(seed, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
