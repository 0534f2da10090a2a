"""How large a cache may be within a budget, and what fields a configuration has."""

import dataclasses
import difflib
import operator
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from jkv.config.counts import parse_bytes
from jkv.status import UsageError

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


class Weighed(Protocol):
    """What a budget asks of a configuration."""

    @property
    def bytes(self) -> int:
        """Bytes of the whole cache."""


Config = TypeVar("Config", bound=Weighed)


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


def fit_either(
    # returns the configuration for a number of sequences
    fit_sequences: Callable[[int], Config],
    max_context_length: int,  # tokens of each, for the message
    max_sequences: int | None,  # how many; None for as many as fit the budget
    # bytes, or text such as "40GB"; None where the number is given
    budget_bytes: int | str | None,
) -> Config:
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
