"""What a `RolloutConfig` asks for: read, or refused by name."""

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
    # The vanilla engine's alone, as tunix says: there is no dense cache to size.
    "kv_cache_size",
}


class CallOptions(NamedTuple):
    """The options of one call."""

    max_new_tokens: int
    max_prompt_length: int
    is_greedy: bool
    temperature: float  # 1 where it is greedy
    top_p: float
    top_k: int  # 0 is off
    stop_tokens: tuple[int, ...]
    key: jax.Array  # the key of the run, key[]
    wants_logprobs: bool


def read_options(
    config: RolloutConfig,
    eos_id: int,  # what ends a sequence unless `eos_tokens` says
) -> CallOptions:
    """Return what a call of a rollout is asked for.

    The meaning is that of the vanilla engine: without `top_p` tokens are chosen
    greedily, whatever the temperature; a `top_k` below 1 is off; without a seed the key
    is that of 0. A temperature of 0 is greedy too, as `RolloutConfig` says.
    """
    check_options(config)
    is_greedy = config.top_p is None or config.temperature == 0
    asked = jkv.Sampling(  # checks the numbers
        temperature=config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=max(config.top_k or 0, 0),
    )
    return CallOptions(
        max_new_tokens=config.max_tokens_to_generate,
        max_prompt_length=config.max_prompt_length,
        is_greedy=is_greedy,
        temperature=1.0 if is_greedy else float(asked.temperature),
        top_p=float(asked.top_p),
        top_k=int(asked.top_k),
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
            f"RolloutConfig.{', '.join(refused)}: JkvRollout has no such option; leave "
            f"the default. It runs on the mesh of the role, and the sizes of its cache "
            f"are its own arguments (functools.partial(JkvRollout, num_blocks=...))"
        )


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _read_seed(seed: Any) -> jax.Array:
    """Return a key of a number, of a key as `jax.random.PRNGKey` makes it, or of 0."""
    if seed is None or jnp.ndim(seed) == 0 and not _is_key(seed):
        return jax.random.key(0 if seed is None else seed)
    return seed if _is_key(seed) else jax.random.wrap_key_data(seed)


def _is_key(seed: Any) -> bool:
    dtype = getattr(seed, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
