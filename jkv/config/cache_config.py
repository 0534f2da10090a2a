"""CacheConfig: the sizes of a cache, checked before anything is allocated.

All arithmetic is on Python ints, which cannot overflow.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jkv.config.dtypes import checked_dtype, needs_scales
from jkv.config.huggingface import read_sizes
from jkv.config.layout import Sizes, lay_out, lay_out_storage
from jkv.config.units import human_bytes, parse_bytes

logger = logging.getLogger(__name__)


# Ring positions are added before they are wrapped: twice the largest must fit in i32.
MAX_COUNT = 2**30 - 1


GIGABYTE = 10**9


# Sequences that `from_model` makes room for, unless told otherwise.
DEFAULT_SEQUENCES = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Sizes of a cache. Every count is a positive int.

    Args:
      num_layers: attention layers of the model, L.
      num_kv_heads: key/value heads per layer, K.
      head_dim: size of one key, D.
      num_blocks: blocks in the pool, N, shared by all sequences.
      max_sequences: sequences open at one time, S.
      max_context_length: tokens one sequence may hold; need not be a multiple of
        `block_size`.
      block_size: tokens per block, T.
      value_head_dim: size of one value, Dv; `None` means `head_dim`.
      values_in_keys: the values are the first `value_head_dim` elements of the keys and
        are not stored again: a latent cache (DeepSeek: one kv head, D 576, Dv 512).
      dtype: of keys and values: float32, float16, bfloat16; or one byte an element and
        a bfloat16 scale per token and kv head: int8, float8_e4m3fn, float8_e4m3fnuz,
        float8_e5m2. "fp8" means float8_e4m3fn, on every card.
      record_tokens: also keep the token ids given to `append(..., tokens=)`, 4 bytes a
        token, for `tokens(cache, seq_id)`.
      prefix_caching: index full blocks by their tokens, so that a prompt that begins
        like an earlier one finds its keys and values. Takes 4 bytes a token (tokens are
        recorded) and 116 a block.

    Raises:
      ValueError: for a size that cannot work, saying what to change.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(
      ...     num_layers=2, num_kv_heads=4, head_dim=64, num_blocks=32,
      ...     max_sequences=8, max_context_length=256, dtype="float32")
      >>> config.bytes
      2098280
      >>> config.max_blocks_per_sequence
      16
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    max_sequences: int
    max_context_length: int
    block_size: int = 16
    value_head_dim: int | None = None
    values_in_keys: bool = False
    dtype: Any = jnp.bfloat16
    record_tokens: bool = False
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        """Normalise the dtype and reject what cannot work."""
        if self.value_head_dim is None:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        object.__setattr__(self, "dtype", checked_dtype(self.dtype))
        for field in dataclasses.fields(self):
            if field.type in (int, int | None):
                count = _checked_count(field.name, getattr(self, field.name))
                object.__setattr__(self, field.name, count)
        checked_num_blocks(self.num_blocks, self.prefix_caching)
        assert self.value_head_dim is not None
        if self.values_in_keys and self.value_head_dim > self.head_dim:
            raise ValueError(
                f"with values_in_keys the values are part of the keys: value_head_dim "
                f"{self.value_head_dim} must be at most head_dim {self.head_dim}"
            )
        table = self.max_sequences * self.max_blocks_per_sequence
        if table > MAX_COUNT:
            raise ValueError(
                f"the block tables would have max_sequences * blocks per sequence = "
                f"{self.max_sequences} * {self.max_blocks_per_sequence} = {table} "
                f"entries, more than {MAX_COUNT}; lower max_sequences or "
                f"max_context_length, or raise block_size"
            )

    @property
    def is_quantized(self) -> bool:
        """Whether elements have one byte, and scales beside them."""
        return needs_scales(self.dtype)

    @property
    def max_blocks_per_sequence(self) -> int:
        """Columns of the block tables, M: enough for `max_context_length` tokens."""
        return -(-self.max_context_length // self.block_size)

    @property
    def capacity_tokens(self) -> int:
        """Tokens the pool can hold when nothing is shared: N * T."""
        return self.num_blocks * self.block_size

    @property
    def sizes(self) -> Sizes:
        """What decides the arrays of the cache: its fields, by the same names."""
        return Sizes(**{name: getattr(self, name) for name in Sizes._fields})

    @property
    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every array of the cache, by name."""
        return {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for name, array in lay_out(self.sizes).items()
        }

    @property
    def bytes(self) -> int:
        """Bytes of the whole cache, equal to the sum of the arrays' `nbytes`."""
        return sum(array.nbytes for array in lay_out(self.sizes).values())

    @property
    def storage_bytes(self) -> int:
        """Bytes of keys and values, with their scales."""
        return sum(array.nbytes for array in lay_out_storage(self.sizes).values())

    @property
    def metadata_bytes(self) -> int:
        """Bytes of everything else."""
        return self.bytes - self.storage_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.storage_bytes // self.capacity_tokens

    def longest_context(self, num_sequences: int) -> int:
        """Return how many tokens so many sequences can have each, all at once.

        Nothing shared, at most `max_context_length`; 0 if there are not so many.

        Example:
          >>> import jkv
          >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
          ...     num_blocks=10, max_sequences=4, max_context_length=100)
          >>> config.longest_context(3), config.longest_context(1)
          (48, 100)
        """
        if not 1 <= num_sequences <= self.max_sequences:
            return 0
        tokens = self.num_blocks // num_sequences * self.block_size
        return min(tokens, self.max_context_length)

    def most_sequences(self, context_length: int) -> int:
        """Return how many sequences can have so many tokens each, all at once.

        Nothing shared, at most `max_sequences`; 0 if one cannot be that long.

        Example:
          >>> import jkv
          >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
          ...     num_blocks=10, max_sequences=4, max_context_length=100)
          >>> config.most_sequences(48), config.most_sequences(101)
          (3, 0)
        """
        if context_length > self.max_context_length:
            return 0
        blocks = max(-(-context_length // self.block_size), 1)
        return min(self.num_blocks // blocks, self.max_sequences)

    def __str__(self) -> str:
        """Say it in human units."""
        heads = f"{self.num_kv_heads} kv heads of {self.head_dim}"
        if self.value_head_dim != self.head_dim:
            where = " in the keys" if self.values_in_keys else ""
            heads += f" (values of {self.value_head_dim}{where})"
        also = [
            text
            for text, holds in (
                ("tokens recorded", self.record_tokens),
                ("prefix caching", self.prefix_caching),
            )
            if holds
        ]
        return "\n".join(
            [
                ", ".join(
                    [f"{self.num_layers} layers, {heads}, {self.dtype.name}"] + also
                ),
                f"{self.num_blocks:,} blocks of {self.block_size} = "
                f"{self.capacity_tokens:,} tokens, {human_bytes(self.bytes_per_token)} "
                f"each",
                f"{self.max_sequences:,} sequences of up to "
                f"{self.max_context_length:,} tokens",
                f"{human_bytes(self.bytes)}, {human_bytes(self.metadata_bytes)} of it "
                f"metadata",
            ]
        )

    @classmethod
    def for_memory(cls, budget_bytes: int | str, **sizes: Any) -> Self:
        """Return the configuration with the most blocks that fit a budget.

        Args:
          budget_bytes: bytes the whole cache may take, or text such as "40GB".
          **sizes: every other field of `CacheConfig` but `num_blocks`.

        Raises:
          ValueError: if not even one block fits.

        Example:
          >>> import jkv
          >>> config = jkv.CacheConfig.for_memory(
          ...     2**20, num_layers=2, num_kv_heads=2, head_dim=32, max_sequences=4,
          ...     max_context_length=128)
          >>> config.num_blocks, config.bytes <= 2**20
          (127, True)
        """
        # Bytes are linear in the number of blocks: two points give the line.
        budget = parse_bytes(budget_bytes)
        one = cls(num_blocks=1, **sizes).bytes
        each = cls(num_blocks=2, **sizes).bytes - one
        if one > budget:
            raise ValueError(
                f"a cache with a single block takes {one} bytes, the budget is "
                f"{budget}; raise the budget, or lower max_sequences, "
                f"max_context_length or block_size"
            )
        return cls(num_blocks=1 + (budget - one) // each, **sizes)

    @classmethod
    def for_context_length(
        cls,
        max_context_length: int,
        *,
        max_sequences: int | None = None,
        budget: int | str | None = None,
        **sizes: Any,
    ) -> Self:
        """Return a configuration whose pool never refuses for want of blocks.

        Args:
          max_context_length: tokens each sequence may hold.
          max_sequences: sequences that may all be that long at once, none shared.
          budget: bytes the whole cache may take, or text such as "40GB"; as many
            sequences as fit. Give this or `max_sequences`.
          **sizes: the other fields of `CacheConfig` but `num_blocks`.

        Raises:
          ValueError: if not even one sequence fits the budget.

        Example:
          >>> import jkv
          >>> sizes = dict(num_layers=1, num_kv_heads=1, head_dim=8)
          >>> config = jkv.CacheConfig.for_context_length(100, max_sequences=3, **sizes)
          >>> config.num_blocks
          21
          >>> config = jkv.CacheConfig.for_context_length(100, budget="1MiB", **sizes)
          >>> config.num_blocks == 7 * config.max_sequences, config.bytes <= 2**20
          (True, True)
        """
        if (max_sequences is None) == (budget is None):
            raise ValueError("give max_sequences or budget, and not both")

        sizes["max_context_length"] = max_context_length
        if budget is None:
            assert max_sequences is not None
            return cls._for_sequences(max_sequences, sizes)
        # Bytes are linear in the number of sequences, too.
        limit = parse_bytes(budget)
        one = cls._for_sequences(1, sizes).bytes
        each = cls._for_sequences(2, sizes).bytes - one
        if one > limit:
            raise ValueError(
                f"one sequence of {max_context_length} tokens takes {one} bytes, the "
                f"budget is {limit}; raise the budget, or lower max_context_length"
            )
        return cls._for_sequences(1 + (limit - one) // each, sizes)

    @classmethod
    def from_model(
        cls, folder: str | Path, *, budget: int | str | None = None, **overrides: Any
    ) -> Self:
        """Return the configuration for a Hugging Face checkpoint that fits a budget.

        Layers, kv heads, head dim, the longest context and the dtype are read from the
        folder's config.json. What a model ignores of its past (sliding windows) is kept
        all the same; this is logged.

        Args:
          folder: where config.json lies.
          budget: bytes the whole cache may take, or text such as "40GB"; `None` only
            with `num_blocks`.
          **overrides: any field of `CacheConfig`, instead of what the model says;
            `max_sequences` is 256 unless given.

        Raises:
          FileNotFoundError: without a config.json.
          ValueError: if no block fits, or for a model whose sizes cannot be told,
            saying what to give.
        """
        if ("num_blocks" in overrides) == (budget is not None):
            raise ValueError("give budget or num_blocks, and not both")
        fields, notes = read_sizes(folder, overrides)
        for note in notes:
            logger.info("%s: %s", folder, note)
        fields = {"max_sequences": DEFAULT_SEQUENCES} | fields | overrides
        return cls(**fields) if budget is None else cls.for_memory(budget, **fields)

    @classmethod
    def small(cls, **sizes: Any) -> Self:
        """Return the preset for 4 GB: blocks of 16, 32 sequences of up to 4,096 tokens.

        Args:
          **sizes: `num_layers`, `num_kv_heads`, `head_dim` of the model, and whatever
            is to differ from the preset.

        Example:
          >>> import jkv
          >>> config = jkv.CacheConfig.small(num_layers=16, num_kv_heads=8, head_dim=64)
          >>> config.block_size, config.bytes <= 4 * 10**9
          (16, True)
        """
        return cls._preset(4, sizes, 16, 32, 4096)

    @classmethod
    def medium(cls, **sizes: Any) -> Self:
        """Return the preset for 12 GB: blocks of 32, 64 sequences of up to 16,384."""
        return cls._preset(12, sizes, 32, 64, 16_384)

    @classmethod
    def large(cls, **sizes: Any) -> Self:
        """Return the preset for 40 GB: blocks of 64, 256 sequences of up to 65,536."""
        return cls._preset(40, sizes, 64, 256, 65_536)

    @classmethod
    def _for_sequences(cls, max_sequences: int, sizes: dict[str, Any]) -> Self:
        """Return the configuration with blocks for so many sequences of full length."""
        config = cls(num_blocks=1, max_sequences=max_sequences, **sizes)
        blocks = config.max_sequences * config.max_blocks_per_sequence
        return dataclasses.replace(config, num_blocks=blocks)

    @classmethod
    def _preset(
        cls,
        gigabytes: int,
        sizes: dict[str, Any],
        block_size: int,
        max_sequences: int,
        max_context_length: int,
    ) -> Self:
        preset = {
            "block_size": block_size,
            "max_sequences": max_sequences,
            "max_context_length": max_context_length,
        }
        return cls.for_memory(gigabytes * GIGABYTE, **{**preset, **sizes})


def checked_num_blocks(num_blocks: int, prefix_caching: bool) -> int:
    """Return the size of a pool, or raise a `ValueError` that says what to change."""
    num_blocks = _checked_count("num_blocks", num_blocks)
    # With a prefix index the ring is twice as long, and so are sums of its places.
    if prefix_caching and num_blocks > MAX_COUNT // 2:
        raise ValueError(
            f"num_blocks must be at most {MAX_COUNT // 2} with prefix_caching, got "
            f"{num_blocks}; lower it, or raise block_size"
        )
    return num_blocks


def _checked_count(name: str, value: Any) -> int:
    """Return a size as a Python int, positive and small enough for 32-bit indices."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(
            f"{name} must be an int, got {value!r} of type {type(value).__name__}; "
            f"convert it with int(...)"
        )
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    if value > MAX_COUNT:
        raise ValueError(f"{name} must be at most {MAX_COUNT}, got {value}; lower it")
    return int(value)
