"""Names of fields that do not exist, answered with the one that was meant."""

import dataclasses
import difflib
from collections.abc import Iterable

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
