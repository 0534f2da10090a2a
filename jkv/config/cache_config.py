"""CacheConfig: the sizes of a cache, validated before any array is allocated."""

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

# The fields that must be positive ints.
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

_TOY: dict[str, Any] = dict(
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    num_blocks=8,
    block_size=4,
    max_sequences=4,
    max_context_length=16,
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
      max_sequences: most open sequences, S.
      max_context_length: most tokens of a sequence; need not be a multiple of
        `block_size`.
      block_size: tokens per block, T.
      value_head_dim: size of one value, Dv; None for `head_dim`.
      values_in_keys: the values are the first `value_head_dim` elements of the keys and
        are not stored again: a latent cache (DeepSeek: one kv head, D 576, Dv 512).
      dtype: of keys and values: float32, float16, bfloat16; one byte per element and a
        bfloat16 scale per token and kv head: int8, float8_e4m3fn, float8_e4m3fnuz,
        float8_e5m2 ("fp8" is float8_e4m3fn on every device); or half a byte and a
        scale: "int4", for even head dims.
      value_dtype: of values, if it differs from the keys' `dtype`.
      record_tokens: store the token ids passed to `append(..., tokens=)` for
        `tokens(cache, seq_id)`; 4 bytes per token.
      prefix_caching: index full blocks by their tokens, so that a prompt with a cached
        prefix reuses its keys and values. Takes 4 bytes per token (tokens are recorded)
        and 116 per block, 128 with a sliding window. Several groups share one index:
        set `GroupedConfig.prefix_caching` for them.
      keep_classes: number of retention priorities of cached blocks (`free(keep=)`), 1
        to 8; lower ones are evicted first. Each above the first takes 12 bytes per
        block, and all together 12 more.
      sliding_window: sliding window of these layers in tokens, the row's own included;
        None for full attention. `append` releases blocks left of the window, so the
        blocks of a sequence are bounded. Takes 4 bytes per sequence. Layers with other
        windows form further groups (`GroupedConfig`).
      num_sink_tokens: first tokens of each sequence that are exempt from the window.
      pruning: sequences can drop tokens from their middle (`prune`). Takes 8 bytes per
        sequence. The same in all groups of a `GroupedConfig`.
      observed_queries: newest queries of each sequence to store (`observe`), for rules
        of `jkv.press` that need them. In layers without a sliding window they take
        `num_query_heads * head_dim` elements each per layer and sequence, in the keys'
        dtype, or bfloat16 if that is shorter.
      num_query_heads: query heads of the observed queries, a multiple of
        `num_kv_heads`; None for the same number.

    Raises:
      ValueError: a size out of range, or an inconsistent combination of fields.

    Example:
      >>> import jkv
      >>> config = jkv.CacheConfig(
      ...     num_layers=2, num_kv_heads=4, head_dim=64, num_blocks=32,
      ...     max_sequences=8, max_context_length=256, dtype="float32")
      >>> config.bytes, config.max_blocks_per_sequence
      (2098320, 16)
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
    pruning: bool = False
    observed_queries: int = 0
    num_query_heads: int | None = None

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
        if self.observed_queries != 0 or self.num_query_heads is not None:
            self._check_observed()
        assert self.value_head_dim is not None
        if self.values_in_keys and self.value_head_dim > self.head_dim:
            raise ValueError(
                f"value_head_dim must be at most head_dim {self.head_dim} with "
                f"values_in_keys, got {self.value_head_dim}; lower value_head_dim"
            )
        if self.values_in_keys and self.value_dtype not in (None, self.dtype):
            raise ValueError(
                f"value_dtype must be {self.dtype.name}, the dtype of the keys, with "
                f"values_in_keys, got {self.value_dtype.name}; omit value_dtype"
            )
        self.sizes.lay_out_storage()
        counts.check_tables(self.max_sequences, self.max_blocks_per_sequence)

    def _check_observed(self) -> None:
        """Check the number of queries, and that the kv heads divide the query heads."""
        if self.observed_queries != 0:
            count = counts.checked_count("observed_queries", self.observed_queries)
            object.__setattr__(self, "observed_queries", count)
        if self.num_query_heads is None:
            if self.observed_queries:
                object.__setattr__(self, "num_query_heads", self.num_kv_heads)
            return
        heads = counts.checked_count("num_query_heads", self.num_query_heads)
        object.__setattr__(self, "num_query_heads", heads)
        if heads % self.num_kv_heads:
            raise ValueError(
                f"num_query_heads must be a multiple of num_kv_heads "
                f"{self.num_kv_heads}, got {heads}; pass the model's query heads"
            )

    @property
    def is_quantized(self) -> bool:
        """True if keys or values are quantized, and are read as float32."""
        return any(each.is_quantized for each in self.sizes.formats)

    @property
    def max_blocks_per_sequence(self) -> int:
        """Columns of the block tables, M: enough for `max_context_length` tokens."""
        return self.sizes.max_blocks_per_sequence

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the pool without shared blocks: N * T."""
        return self.num_blocks * self.block_size

    @property
    def sizes(self) -> Sizes:
        """The sizes of the group, as input of `jkv.config.layout`."""
        fields = {name: getattr(self, name) for name in Sizes._fields}
        value_dtype = self.dtype if self.value_dtype is None else self.value_dtype
        return Sizes(**fields | {"value_dtype": value_dtype})

    @property
    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every array of the cache, by path."""
        arrays = lay_out((self.sizes,), self.prefix_caching)
        return {name: array.struct for name, array in arrays.items()}

    @property
    def bytes(self) -> int:
        """Bytes of the cache: the sum of its arrays' `nbytes`."""
        return count_bytes(lay_out((self.sizes,), self.prefix_caching).values())

    @property
    def storage_bytes(self) -> int:
        """Bytes of keys and values, with their scales."""
        return count_bytes(self.sizes.lay_out_storage().values())

    @property
    def metadata_bytes(self) -> int:
        """Bytes of the metadata: all arrays but the storage."""
        return self.bytes - self.storage_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.storage_bytes // self.capacity_tokens

    def most_blocks(self, num_tokens: int = 1) -> int:
        """Return the largest number of blocks of one sequence without reservations.

        A pool with this many blocks per sequence never runs out of blocks.

        Args:
          num_tokens: most tokens that one `append` adds to a sequence. Matters only
            with a sliding window: a step keeps the window of its first row.

        Example:
          >>> import jkv
          >>> config = jkv.CacheConfig.toy(num_blocks=10, max_context_length=100,
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
        """Return the tokens that each of `num_sequences` can have without sharing.

        At most `max_context_length`, and 0 if `num_sequences` is out of range. With a
        sliding window the sequences are assumed to be decoding.

        Example:
          >>> import jkv
          >>> config = jkv.CacheConfig.toy(block_size=16, num_blocks=10,
          ...     max_context_length=100)
          >>> config.longest_context(3), config.longest_context(1)
          (48, 100)
        """
        if not 1 <= num_sequences <= self.max_sequences:
            return 0
        blocks, longest = self.num_blocks // num_sequences, self.max_context_length
        is_enough = blocks >= self.most_blocks()
        return longest if is_enough else min(blocks * self.block_size, longest)

    def most_sequences(self, context_length: int) -> int:
        """Return how many sequences of `context_length` fit without sharing.

        At most `max_sequences`, and 0 if `context_length` is too long. With a sliding
        window the sequences are assumed to be decoding.

        Example:
          >>> import jkv
          >>> config = jkv.CacheConfig.toy(block_size=16, num_blocks=10,
          ...     max_context_length=100)
          >>> config.most_sequences(48), config.most_sequences(101)
          (3, 0)
        """
        if context_length > self.max_context_length:
            return 0
        blocks = max(-(-context_length // self.block_size), 1)
        each = min(blocks, self.most_blocks())
        return min(self.num_blocks // each, self.max_sequences)

    def __str__(self) -> str:
        """Summarize the configuration in four lines."""
        return "\n".join(describe((self.sizes,), self.prefix_caching))

    @classmethod
    def toy(cls, **fields: Any) -> Self:
        """Return small sizes for examples and tests; fields replace them.

        One layer with one kv head of 8, in bfloat16; 8 blocks of 4 tokens; 4 sequences
        of up to 16 tokens.

        Args:
          **fields: fields of `CacheConfig`.

        Raises:
          ValueError: an unknown or invalid field.

        Example:
          >>> import jkv
          >>> jkv.init(jkv.CacheConfig.toy(dtype="int8", num_layers=2))
          Cache(2 layers, 1 kv heads, head dim 8, int8, 1.7 KiB)
            blocks     8 of 8 free, 4 tokens each
            sequences  0 of 4 open, 0 tokens, at most 16 each
        """
        sizing.check_names("toy", cls, fields)
        return cls(**_TOY | fields)

    @classmethod
    def for_memory(cls, budget_bytes: int | str, **sizes: Any) -> Self:
        """Return the configuration with the most blocks within a memory budget.

        Args:
          budget_bytes: bytes of the whole cache, as an int or a string like "40GB".
          **sizes: all other fields of `CacheConfig` except `num_blocks`.

        Raises:
          ValueError: a budget below one block, or an invalid field.

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
        """Return a configuration with a pool that never runs out of blocks.

        Args:
          max_context_length: most tokens of a sequence.
          max_sequences: number of sequences of that length without sharing.
          budget_bytes: alternatively, a budget for as many such sequences as fit, in
            bytes or as a string like "40GB".
          **sizes: the other fields of `CacheConfig` except `num_blocks`.

        Raises:
          ValueError: both or neither of `max_sequences` and `budget_bytes`, a budget
            below one sequence, or an invalid field.

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
        """Return the configuration for a Hugging Face checkpoint within a budget.

        Reads layers, kv heads, head dim, longest context and dtype from config.json.
        Sliding windows are ignored with a log message, and all tokens are kept; use
        `GroupedConfig.from_model` to respect them.

        Args:
          folder: folder of config.json.
          budget_bytes: bytes of the whole cache, as an int or a string like "40GB";
            None only with `num_blocks`.
          **overrides: fields of `CacheConfig` that replace the model's;
            `max_sequences` defaults to 256.

        Raises:
          FileNotFoundError: no config.json.
          ValueError: a budget below one block, a model of unknown sizes, or layers
            with different heads (Gemma 4, MiMo-V2-Flash); use
            `GroupedConfig.from_model` for these.
        """
        from jkv.config.huggingface import read_fields

        sizing.check_names("from_model", cls, overrides, "budget_bytes")
        if ("num_blocks" in overrides) == (budget_bytes is not None):
            raise ValueError(
                "from_model needs either budget_bytes or num_blocks; pass one of them"
            )
        fields = read_fields(folder, overrides)
        if budget_bytes is None:
            return cls(**fields)
        return cls.for_memory(budget_bytes, **fields)

    @classmethod
    def small(cls, **sizes: Any) -> Self:
        """Return a preset for 4 GB: blocks of 16, 32 sequences of up to 4,096 tokens.

        Args:
          **sizes: `num_layers`, `num_kv_heads`, `head_dim` of the model, and overrides
            of the preset, as for `for_memory`.

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
        """Return a preset for 12 GB: blocks of 32, 64 sequences of up to 16,384 tokens.

        Args:
          **sizes: as for `small`.
        """
        suited = dict(block_size=32, max_sequences=64, max_context_length=16_384)
        return cls.for_memory("12GB", **suited | sizes)

    @classmethod
    def large(cls, **sizes: Any) -> Self:
        """Return a preset for 40 GB: blocks of 64, 256 sequences of up to 65536 tokens.

        Args:
          **sizes: as for `small`.
        """
        suited = dict(block_size=64, max_sequences=256, max_context_length=65_536)
        return cls.for_memory("40GB", **suited | sizes)
