"""Typed access to config.json; each value is checked when it is read.

Missing keys have the defaults of the architecture's class in transformers, listed in
`architectures.py`. A null value is not replaced by the architecture's default.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MOST = 2**31 - 1  # of an int


def is_int(value: Any) -> bool:
    """True if a JSON value is an integer of 32 bits and not a boolean."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole and abs(value) <= MOST


def is_number(value: Any) -> bool:
    """True if a JSON value is a finite number and not a boolean."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) <= sys.float_info.max


def is_set(given: "Mapping[str, Any] | Settings", key: str) -> bool:
    """True if a number is given; 0 and null mean none."""
    return given.get(key) not in (None, 0)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Contents of a config.json, with the defaults of its architecture."""

    raw: Mapping[str, Any]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # The architecture's own names of common keys.
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    file: str = "config.json"

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value without a check; `default` for null and for missing keys."""
        stored = self.name(key)
        value = self.raw[stored] if stored in self.raw else self.defaults.get(key)
        return default if value is None else value

    def name(self, key: str) -> str:
        """Return the name of a key in this file; the architecture's own if missing."""
        return key if key in self.raw else self.aliases.get(key, key)

    def first(self, *keys: str) -> str:
        """Return the first key with a value; without one, the first key in the file."""
        stored = [key for key in keys if self.name(key) in self.raw]
        given = [key for key in keys if self.get(key) is not None]
        return (given or stored or keys)[0]

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer >= `least`."""
        value = self.get(key, default)
        if not is_int(value) or value < least:
            is_large = isinstance(value, int) and value > MOST
            kind = f"an int <= {MOST}" if is_large else f"an int >= {least}"
            raise self._error(key, kind, value)
        return int(value)

    def maybe_count(self, key: str) -> int | None:
        """Return an integer >= 1, or None for null or a missing key."""
        return None if self.get(key) is None else self.count(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self.get(key, default)
        if not is_number(value) or value <= 0:
            raise self._error(key, "a number above 0", value)
        return float(value)

    def maybe_number(self, key: str) -> float | None:
        """Return a positive number, or None for null or a missing key."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._error(key, "true or false", value)
        return value

    def ints(self, key: str) -> list[int] | None:
        """Return a list of integers, or None for a missing key."""
        return self._list(key, is_int, "ints")

    def names(self, key: str) -> list[str] | None:
        """Return a list of strings, or None for a missing key."""
        return self._list(key, lambda name: isinstance(name, str), "strings")

    def part(
        self, key: str, default: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Return a nested object."""
        value = self.get(key, default)
        if not isinstance(value, Mapping):
            raise self._error(key, "an object", value)
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return token ids, given as null, an integer or a list."""
        value = self.get(key)
        ids = () if value is None else value if isinstance(value, list) else (value,)
        if not all(is_int(token) and token >= 0 for token in ids):
            raise self._error(key, "ids >= 0", value)
        return tuple(ids)

    def _list(self, key: str, is_entry: Callable[[Any], bool], kind: str) -> Any:
        value = self.get(key)
        if value is None or (isinstance(value, list) and all(map(is_entry, value))):
            return value
        raise self._error(key, f"a list of {kind}", value)

    def _error(self, key: str, kind: str, value: Any) -> ValueError:
        name = self.name(key)
        return ValueError(f"{self.file}: {name!r} must be {kind}, got {value!r}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ValueError: if the file is not a JSON object.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return contents


def read_tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, updated by special_tokens_map.json.

    The second file is of an older format, and is ignored if the first one lists the
    added tokens.
    """
    settings: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file() and "added_tokens_decoder" not in settings:
            settings |= read_json(folder / name)
    return settings
