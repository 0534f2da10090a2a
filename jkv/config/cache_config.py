"""CacheConfig: the sizes of a cache, checked before anything is allocated."""

import dataclasses
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp

from jkv.arguments import explains_class
from jkv.config import counts, sizing
from jkv.config.counts import count_bytes
from jkv.config.layout import Sizes, describe, lay_out
from jkv.formats.table import checked_dtype

# The fields that are checked as counts.
COUNTS = (
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "value_head_dim",
    "num_blocks",
    "block_size",
    "max_sequences",
    "max_context_length",
)


@explains_class
@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Sizes of a cache, or of one group of its layers. Every count is a positive int.

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
        float8_e5m2. "fp8" means float8_e4m3fn, on every card. Or half a byte and such a
        scale, "int4", for even head dims.
      value_dtype: of values, where they are stored otherwise than keys.
      record_tokens: also keep the token ids given to `append(..., tokens=)`, 4 bytes a
        token, for `tokens(cache, seq_id)`.
      prefix_caching: index full blocks by their tokens, so that a prompt that begins
        like an earlier one finds its keys and values. Takes 4 bytes a token (tokens are
        recorded) and 116 a block, 128 with a sliding window. Of several groups the
        whole has an index: there it is a field of `GroupedConfig`.
      keep_classes: classes of cached blocks (`free(keep=)`), 1 to 8: lower ones are
        handed out first. Each above the first takes 12 bytes a block, all of them 12
        more.
      sliding_window: tokens that a row of these layers sees, itself counted; `None`:
        all. `append` gives back the blocks that no row will see again, so that a
        sequence keeps about that many tokens however long it is. 4 bytes a sequence.
        Layers with other windows are groups of their own (`GroupedConfig`).
      num_sink_tokens: first tokens of each sequence that these layers keep all the
        same.

    Raises:
      ValueError: for a size that cannot work, saying what to change.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(
      ...     num_layers=2, num_kv_heads=4, head_dim=64, num_blocks=32,
      ...     max_sequences=8, max_context_length=256, dtype="float32")
      >>> config.bytes, config.max_blocks_per_sequence
      (2098296, 16)
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
    value_dtype: Any = None
    record_tokens: bool = False
    prefix_caching: bool = False
    sliding_window: int | None = None
    num_sink_tokens: int = 0
    keep_classes: int = 1

    def __post_init__(self) -> None:
        if self.value_head_dim is None:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        object.__setattr__(self, "dtype", checked_dtype(self.dtype))
        if self.value_dtype is not None:
            value_dtype = checked_dtype(self.value_dtype, "value_dtype")
            object.__setattr__(self, "value_dtype", value_dtype)
        for name in COUNTS:
            object.__setattr__(
                self, name, counts.checked_count(name, getattr(self, name))
            )
        counts.checked_num_blocks(self.num_blocks, self.prefix_caching)
        classes = counts.check_classes(self.keep_classes, self.prefix_caching)
        object.__setattr__(self, "keep_classes", classes)
        window, sinks = counts.check_window(
            self.sliding_window,
            self.num_sink_tokens,
            self.block_size,
            self.prefix_caching,
        )
        object.__setattr__(self, "sliding_window", window)
        object.__setattr__(self, "num_sink_tokens", sinks)
        assert self.value_head_dim is not None
        if self.values_in_keys and self.value_head_dim > self.head_dim:
            raise ValueError(
                f"with values_in_keys the values are part of the keys: value_head_dim "
                f"{self.value_head_dim} must be at most head_dim {self.head_dim}"
            )
        if self.values_in_keys and self.value_dtype not in (None, self.dtype):
            raise ValueError(
                f"with values_in_keys the values are part of the keys, of dtype "
                f"{self.dtype.name}: leave value_dtype out, got {self.value_dtype.name}"
            )
        self.sizes.lay_out_storage()
        counts.check_tables(self.max_sequences, self.max_blocks_per_sequence)

    @property
    def is_quantized(self) -> bool:
        """Whether keys or values are rounded to steps of their own, read as float32."""
        return any(each.is_quantized for each in self.sizes.formats)

    @property
    def max_blocks_per_sequence(self) -> int:
        """Columns of the block tables, M: enough for `max_context_length` tokens."""
        return self.sizes.max_blocks_per_sequence

    @property
    def capacity_tokens(self) -> int:
        """Tokens the pool can hold when nothing is shared: N * T."""
        return self.num_blocks * self.block_size

    @property
    def sizes(self) -> Sizes:
        """The fields as `jkv.config.layout` takes them."""
        fields = {name: getattr(self, name) for name in Sizes._fields}
        value_dtype = self.dtype if self.value_dtype is None else self.value_dtype
        return Sizes(**fields | {"value_dtype": value_dtype})

    @property
    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every array of the cache, by its path in the cache."""
        arrays = lay_out((self.sizes,), self.prefix_caching)
        return {name: array.struct for name, array in arrays.items()}

    @property
    def bytes(self) -> int:
        """Bytes of the whole cache, equal to the sum of the arrays' `nbytes`."""
        return count_bytes(lay_out((self.sizes,), self.prefix_caching).values())

    @property
    def storage_bytes(self) -> int:
        """Bytes of keys and values, with their scales."""
        return count_bytes(self.sizes.lay_out_storage().values())

    @property
    def metadata_bytes(self) -> int:
        """Bytes of everything else."""
        return self.bytes - self.storage_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.storage_bytes // self.capacity_tokens

    def most_blocks(self, num_tokens: int = 1) -> int:
        """Return the most blocks that one sequence ever has, nothing reserved.

        A pool with so many for each sequence refuses no request for want of blocks.

        Args:
          num_tokens: the most that one `append` adds to a sequence. It matters with a
            sliding window only: rows of one step keep what the first of them sees.

        Example:
          >>> import jkv
          >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
          ...     num_blocks=10, max_sequences=4, max_context_length=100, block_size=4,
          ...     sliding_window=8)
          >>> config.most_blocks(), config.most_blocks(16), config.most_blocks(100)
          (3, 11, 25)
        """
        if self.sliding_window is None:
            return self.max_blocks_per_sequence
        blocks = counts.count_window_blocks(
            self.sliding_window, self.num_sink_tokens, self.block_size, num_tokens
        )
        return min(blocks, self.max_blocks_per_sequence)

    def longest_context(self, num_sequences: int) -> int:
        """Return how many tokens so many sequences can have each, nothing shared.

        They are at most `max_context_length`, and 0 if there cannot be so many
        sequences. With a sliding window these are decoding.

        Example:
          >>> import jkv
          >>> config = jkv.CacheConfig(num_layers=1, num_kv_heads=1, head_dim=8,
          ...     num_blocks=10, max_sequences=4, max_context_length=100)
          >>> config.longest_context(3), config.longest_context(1)
          (48, 100)
        """
        if not 1 <= num_sequences <= self.max_sequences:
            return 0
        blocks, longest = self.num_blocks // num_sequences, self.max_context_length
        is_enough = blocks >= self.most_blocks()
        return longest if is_enough else min(blocks * self.block_size, longest)

    def most_sequences(self, context_length: int) -> int:
        """Return how many sequences can have so many tokens each, nothing shared.

        They are at most `max_sequences`, and 0 if no sequence can be that long. With a
        sliding window they are decoding.

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
        each = min(blocks, self.most_blocks())
        return min(self.num_blocks // each, self.max_sequences)

    def __str__(self) -> str:
        """Say it in human units, in four lines."""
        return "\n".join(describe((self.sizes,), self.prefix_caching))

    @classmethod
    def for_memory(cls, budget_bytes: int | str, **sizes: Any) -> Self:
        """Return the configuration with the most blocks that fit a budget.

        Args:
          budget_bytes: bytes the whole cache may take, or text such as "40GB".
          **sizes: every other field of `CacheConfig` but `num_blocks`.

        Raises:
          ValueError: if not even one block fits, or for a size that cannot work.

        Example:
          >>> import jkv
          >>> config = jkv.CacheConfig.for_memory(
          ...     2**20, num_layers=2, num_kv_heads=2, head_dim=32, max_sequences=4,
          ...     max_context_length=128)
          >>> config.num_blocks, config.bytes <= 2**20
          (127, True)
        """
        return sizing.fit_memory(cls, budget_bytes, **sizes)

    @classmethod
    def for_context_length(
        cls,
        max_context_length: int,
        *,
        max_sequences: int | None = None,
        budget_bytes: int | str | None = None,
        **sizes: Any,
    ) -> Self:
        """Return a configuration whose pool never refuses for want of blocks.

        Args:
          max_context_length: tokens each sequence may hold.
          max_sequences: sequences that may all be that long at once, none shared.
          budget_bytes: for as many such sequences as fit these bytes, or text such as
            "40GB".
          **sizes: the other fields of `CacheConfig` but `num_blocks`.

        Raises:
          ValueError: unless either `max_sequences` or `budget_bytes` is given; if not
            even one sequence fits, or for a size that cannot work.

        Example:
          >>> import jkv
          >>> sizes = dict(num_layers=1, num_kv_heads=1, head_dim=8)
          >>> config = jkv.CacheConfig.for_context_length(100, max_sequences=3, **sizes)
          >>> config.num_blocks
          21
          >>> config = jkv.CacheConfig.for_context_length(
          ...     100, budget_bytes="1MiB", **sizes)
          >>> config.num_blocks == 7 * config.max_sequences, config.bytes <= 2**20
          (True, True)
        """
        given = "max_sequences", "budget_bytes"
        sizing.check_names("for_context_length", cls, sizes, *given)
        sizes["max_context_length"] = max_context_length
        return sizing.fit_either(
            lambda count: cls._for_sequences(count, sizes),
            max_context_length,
            max_sequences,
            budget_bytes,
        )

    @classmethod
    def _for_sequences(cls, max_sequences: int, sizes: dict[str, Any]) -> Self:
        small = cls(num_blocks=1, max_sequences=max_sequences, **sizes)
        blocks = small.max_sequences * small.max_blocks_per_sequence
        return dataclasses.replace(small, num_blocks=blocks)

    @classmethod
    def from_model(
        cls,
        folder: str | Path,
        *,
        budget_bytes: int | str | None = None,
        **overrides: Any,
    ) -> Self:
        """Return the configuration for a Hugging Face checkpoint that fits a budget.

        The folder's config.json tells layers, kv heads, head dim, longest context and
        dtype. Sliding windows are ignored: all tokens are kept, and the log says so;
        `GroupedConfig.from_model` keeps what they see.

        Args:
          folder: where config.json lies.
          budget_bytes: bytes the whole cache may take, or text such as "40GB"; `None`
            only with `num_blocks`.
          **overrides: any field of `CacheConfig`, instead of what the model says;
            `max_sequences` is 256 unless given.

        Raises:
          FileNotFoundError: without a config.json.
          ValueError: if no block fits, or for a model whose sizes cannot be told, or
            whose layers differ in their heads (Gemma 4, MiMo-V2-Flash), for which
            `GroupedConfig.from_model` has a group of each.
        """
        from jkv.config.huggingface import read_fields

        sizing.check_names("from_model", cls, overrides, "budget_bytes")
        if ("num_blocks" in overrides) == (budget_bytes is not None):
            raise ValueError("give budget_bytes or num_blocks, and not both")
        fields = read_fields(folder, overrides)
        if budget_bytes is None:
            return cls(**fields)
        return cls.for_memory(budget_bytes, **fields)

    @classmethod
    def small(cls, **sizes: Any) -> Self:
        """Return the preset for 4 GB: blocks of 16, 32 sequences of up to 4,096 tokens.

        Args:
          **sizes: `num_layers`, `num_kv_heads`, `head_dim` of the model, and whatever
            is to differ from the preset, as for `for_memory`.

        Example:
          >>> import jkv
          >>> config = jkv.CacheConfig.small(num_layers=16, num_kv_heads=8, head_dim=64)
          >>> config.block_size, config.bytes <= 4 * 10**9
          (16, True)
        """
        suited = dict(block_size=16, max_sequences=32, max_context_length=4096)
        return cls.for_memory("4GB", **suited | sizes)

    @classmethod
    def medium(cls, **sizes: Any) -> Self:
        """Return that for 12 GB: blocks of 32, 64 sequences of up to 16,384 tokens."""
        suited = dict(block_size=32, max_sequences=64, max_context_length=16_384)
        return cls.for_memory("12GB", **suited | sizes)

    @classmethod
    def large(cls, **sizes: Any) -> Self:
        """Return that for 40 GB: blocks of 64, 256 sequences of up to 65,536 tokens."""
        suited = dict(block_size=64, max_sequences=256, max_context_length=65_536)
        return cls.for_memory("40GB", **suited | sizes)
