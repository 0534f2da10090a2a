"""How large a cache may be: budgets, context lengths, presets, models.

`CacheConfig` hands its classmethods on to these functions, and is itself handed to them
as `make`: what takes its fields and returns a configuration.

Symbols: N blocks in the pool, S sequences, M blocks per sequence, T tokens per block.
"""

import dataclasses
import difflib
import logging
import operator
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from jkv.config.counts import count_window_blocks
from jkv.config.layer_heads import refuse_different
from jkv.config.layer_windows import count_windows
from jkv.config.layout import Sizes
from jkv.config.units import parse_bytes
from jkv.status import UsageError

logger = logging.getLogger("jkv.config")

# Sequences that a model's cache makes room for, unless told otherwise.
DEFAULT_SEQUENCES = 256


# What other projects call the fields.
SYNONYMS = {
    "batch_size": "max_sequences",
    "budget": "budget_bytes",
    "bytes": "budget_bytes",
    "context_length": "max_context_length",
    "gpu_memory": "budget_bytes",
    "heads": "num_kv_heads",
    "kv_cache_dtype": "dtype",
    "layers": "num_layers",
    "max_batch_size": "max_sequences",
    "max_length": "max_context_length",
    "max_model_len": "max_context_length",
    "max_num_seqs": "max_sequences",
    "max_seq_len": "max_context_length",
    "memory": "budget_bytes",
    "num_heads": "num_kv_heads",
    "num_pages": "num_blocks",
    "page_size": "block_size",
    "window": "sliding_window",
}


class Preset(NamedTuple):
    """A budget in bytes, and sizes that suit it."""

    budget: int
    block_size: int
    max_sequences: int
    max_context_length: int


SMALL = Preset(4 * 10**9, 16, 32, 4096)
MEDIUM = Preset(12 * 10**9, 32, 64, 16_384)
LARGE = Preset(40 * 10**9, 64, 256, 65_536)


class Weighed(Protocol):
    """What a budget asks of a configuration."""

    @property
    def bytes(self) -> int:
        """Bytes of the whole cache."""


class Sized(Weighed, Protocol):
    """What these functions ask of a configuration."""

    @property
    def max_sequences(self) -> int:
        """Rows of the block tables, S."""

    @property
    def max_blocks_per_sequence(self) -> int:
        """Columns of the block tables, M."""


Config = TypeVar("Config", bound=Sized)

AnyConfig = TypeVar("AnyConfig", bound=Weighed)


def fit_memory(
    make: Callable[..., Config],  # takes the fields of a configuration, and returns it
    budget_bytes: int | str,  # bytes, or text such as "40GB"
    *,
    # what of a configuration is to fit; linear in the number of blocks
    weigh: Callable[[Config], int] = operator.attrgetter("bytes"),
    **sizes: Any,  # the fields, but for `num_blocks`
) -> Config:
    """Return the configuration with the most blocks: `CacheConfig.for_memory`."""
    check_names("for_memory", make, sizes, "budget_bytes")
    limit = parse_bytes(budget_bytes)

    def count_bytes(num_blocks: int) -> int:
        return weigh(make(num_blocks=num_blocks, **sizes))

    most = find_most(count_bytes, limit)
    if not most:
        raise ValueError(
            f"a cache with a single block takes {count_bytes(1)} bytes, the budget is "
            f"{limit}; raise the budget, or lower max_sequences, "
            f"max_context_length or block_size"
        )
    return make(num_blocks=most, **sizes)


def fit_context_length(
    make: Callable[..., Config],
    max_sequences: int | None,
    budget_bytes: int | str | None,
    **sizes: Any,
) -> Config:
    """Return one that never lacks blocks: `CacheConfig.for_context_length`."""
    check_names("for_context_length", make, sizes, "max_sequences", "budget_bytes")

    def fit_sequences(count: int) -> Config:
        tables = make(num_blocks=1, max_sequences=count, **sizes)
        blocks = tables.max_sequences * tables.max_blocks_per_sequence
        return make(num_blocks=blocks, max_sequences=count, **sizes)

    length = sizes["max_context_length"]
    return fit_either(fit_sequences, length, max_sequences, budget_bytes)


def fit_either(
    # returns the configuration for a number of sequences
    fit_sequences: Callable[[int], AnyConfig],
    max_context_length: int,  # tokens of each, for the message
    max_sequences: int | None,  # how many; None for as many as fit the budget
    # bytes, or text such as "40GB"; None where the number is given
    budget_bytes: int | str | None,
) -> AnyConfig:
    """Return what fits so many sequences, or the most that fit a budget."""
    if (max_sequences is None) == (budget_bytes is None):
        raise ValueError("give max_sequences or budget_bytes, and not both")
    if budget_bytes is None:
        assert max_sequences is not None
        return fit_sequences(max_sequences)
    limit = parse_bytes(budget_bytes)

    def count_bytes(num_sequences: int) -> int:
        return fit_sequences(num_sequences).bytes

    most = find_most(count_bytes, limit)
    if not most:
        raise ValueError(
            f"one sequence of {max_context_length} tokens takes {count_bytes(1)} "
            f"bytes, the budget is {limit}; raise the budget, or lower "
            f"max_context_length"
        )
    return fit_sequences(most)


def find_most(count_bytes: Callable[[int], int], limit: int) -> int:
    """Return the largest number whose bytes are within a limit; 0 if one takes more.

    Bytes are linear in the number, of blocks or of sequences.
    """
    one, two = count_bytes(1), count_bytes(2)  # two points give the line
    return 0 if one > limit else 1 + (limit - one) // (two - one)


def fit_preset(make: Callable[..., Config], preset: Preset, **sizes: Any) -> Config:
    """Return the configuration of a preset; what is given goes before its sizes."""
    suited = preset._asdict()
    budget = suited.pop("budget")
    return fit_memory(make, budget, **suited | sizes)


def fit_model(
    make: Callable[..., Config],
    folder: str | Path,
    budget_bytes: int | str | None,
    **overrides: Any,
) -> Config:
    """Return the configuration for a checkpoint: `CacheConfig.from_model`."""
    from jkv.config.huggingface import read_sizes

    check_names("from_model", make, overrides, "budget_bytes")
    if ("num_blocks" in overrides) == (budget_bytes is not None):
        raise ValueError("give budget_bytes or num_blocks, and not both")
    fields, notes, layer_windows, layer_heads, _ = read_sizes(folder, overrides)
    if not fields["num_layers"]:
        raise ValueError(
            f"{folder}: none of its layers has keys and values; "
            f"GroupedConfig.from_model has a group for their states"
        )
    refuse_different(layer_heads, folder)
    windows = count_windows(layer_windows)
    if windows and overrides.get("sliding_window") is None:
        notes.append(
            f"a sliding window of {windows.length} tokens is ignored: all tokens are "
            f"kept ({windows.num_layers} of {fields['num_layers']} layers have it); "
            f"GroupedConfig.from_model keeps what they see"
        )
    for note in notes:
        logger.info("%s: %s", folder, note)
    fields = {"max_sequences": DEFAULT_SEQUENCES} | fields | overrides
    if budget_bytes is None:
        return make(**fields)
    return fit_memory(make, budget_bytes, **fields)


def find_longest_context(sizes: Sizes, num_sequences: int) -> int:
    """Return the tokens that so many sequences can have each, nothing shared."""
    if not 1 <= num_sequences <= sizes.max_sequences:
        return 0
    blocks = sizes.num_blocks // num_sequences
    if blocks >= find_most_blocks(sizes, 1):
        return sizes.max_context_length
    return min(blocks * sizes.block_size, sizes.max_context_length)


def find_most_sequences(sizes: Sizes, context_length: int) -> int:
    """Return the sequences that can have so many tokens each, nothing shared."""
    if context_length > sizes.max_context_length:
        return 0
    blocks = max(-(-context_length // sizes.block_size), 1)
    blocks = min(blocks, find_most_blocks(sizes, 1))
    return min(sizes.num_blocks // blocks, sizes.max_sequences)


def find_most_blocks(sizes: Sizes, num_tokens: int) -> int:
    """Return the most blocks of a sequence that grows by so many tokens at a time."""
    if sizes.sliding_window is None:
        return sizes.max_blocks_per_sequence
    blocks = count_window_blocks(
        sizes.sliding_window, sizes.num_sink_tokens, sizes.block_size, num_tokens
    )
    return min(blocks, sizes.max_blocks_per_sequence)


def check_names(
    maker: str,  # the function that was called
    make: object,  # the class whose fields it takes; anything else is not looked at
    given: Iterable[str],
    *others: str,  # names that the function takes beside the fields
) -> None:
    """Refuse names that are no fields, with the nearest that is one."""
    if not (isinstance(make, type) and dataclasses.is_dataclass(make)):
        return
    known = [*others, *(field.name for field in dataclasses.fields(make))]
    for name in given:
        if name in known:
            continue
        meant = SYNONYMS.get(name, name)
        nearest = difflib.get_close_matches(meant, known, n=1, cutoff=0.0)[0]
        raise UsageError(
            f"{maker} has no field {name!r}; the nearest is {nearest!r} (fields: "
            f"{', '.join(known)})"
        )
