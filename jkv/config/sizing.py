"""Search of the largest cache within a budget, and suggestions for field names."""

import dataclasses
import difflib
import operator
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from jkv.config.counts import parse_bytes
from jkv.status import UsageError

# Names of the fields in other projects.
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
    """A configuration with a size in bytes."""

    @property
    def bytes(self) -> int:
        """Bytes of the whole cache."""


Config = TypeVar("Config", bound=Weighed)


def fit_memory(
    make: Callable[..., Config],  # constructor of the configuration
    budget_bytes: int | str,  # bytes, or a string like "40GB"
    *,
    # bytes to fit into the budget, linear in the number of blocks
    weigh: Callable[[Config], int] = operator.attrgetter("bytes"),
    **sizes: Any,  # all fields except `num_blocks`
) -> Config:
    """Implement `CacheConfig.for_memory`."""
    check_names("for_memory", make, sizes, "budget_bytes")
    limit = parse_bytes(budget_bytes)

    def count_bytes(num_blocks: int) -> int:
        return weigh(make(num_blocks=num_blocks, **sizes))

    most = find_most(count_bytes, limit)
    if not most:
        raise ValueError(
            f"budget_bytes must be at least {count_bytes(1)}, as a single block takes "
            f"that many, got {limit}; raise it, or lower max_sequences, "
            f"max_context_length or block_size"
        )
    return make(num_blocks=most, **sizes)


def fit_either(
    # constructs the configuration for a number of sequences
    fit_sequences: Callable[[int], Config],
    max_context_length: int,  # tokens of each, for the message
    max_sequences: int | None,  # number of sequences, None with a budget
    # bytes, or a string like "40GB"; None with `max_sequences`
    budget_bytes: int | str | None,
) -> Config:
    """Return the configuration for `max_sequences`, or for the most in a budget."""
    if (max_sequences is None) == (budget_bytes is None):
        raise ValueError(
            "either max_sequences or budget_bytes must be given; pass one of them"
        )
    if budget_bytes is None:
        assert max_sequences is not None
        return fit_sequences(max_sequences)
    limit = parse_bytes(budget_bytes)

    def count_bytes(num_sequences: int) -> int:
        return fit_sequences(num_sequences).bytes

    most = find_most(count_bytes, limit)
    if not most:
        raise ValueError(
            f"budget_bytes must be at least {count_bytes(1)}, as one sequence of "
            f"{max_context_length} tokens takes that many, got {limit}; raise it, or "
            f"lower max_context_length"
        )
    return fit_sequences(most)


def find_most(count_bytes: Callable[[int], int], limit: int) -> int:
    """Return the largest number with `count_bytes` within the limit, else 0.

    `count_bytes` must be linear in its argument.
    """
    one, two = count_bytes(1), count_bytes(2)  # two points determine the line
    return 0 if one > limit else 1 + (limit - one) // (two - one)


def check_names(
    maker: str,  # name of the called function
    make: object,  # a configuration class; other callables are not checked
    given: Iterable[str],
    *others: str,  # further parameters of the function
) -> None:
    """Reject unknown field names, suggesting the closest one."""
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
