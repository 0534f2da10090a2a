"""A schema document: locations of its parts, keywords and references."""

import json
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jkv.grammar.errors import Malformed, TooLarge, Unsupported
from jkv.grammar.schema import keywords
from jkv.grammar.schema.formats import FORMATS

MAX_LEVELS = 64  # of nested schemas, and of nested values in 'enum' and 'const'
_OLD_DRAFTS = "draft-04", "draft-05", "draft-06", "draft-07"
_REFERENCES = "$ref", "$dynamicRef", "$recursiveRef"


class Location(NamedTuple):
    """The location of a schema."""

    pointer: str  # from the root, such as "#/properties/a"
    base: str  # base URI of its references, without a fragment


class Document:
    """A copy of a schema with resolved references; strict ones have known keywords."""

    def __init__(self, root: Any, *, is_strict: bool) -> None:
        self.root, self._is_strict = _copy(root), is_strict
        if not keywords.is_schema(self.root):
            raise Malformed(f"a schema is an object or a boolean, got {_shorten(root)}")
        dialect = self.root.get("$schema", "") if isinstance(self.root, dict) else ""
        dialect = dialect if isinstance(dialect, str) else ""
        if "draft-03" in dialect:
            raise Unsupported("$schema is draft 3; convert it to draft 2020-12")
        self._is_old = any(draft in dialect for draft in _OLD_DRAFTS)
        self._id = "id" if "draft-04" in dialect else "$id"
        self._locations: dict[int, Location] = {}
        self._resources: dict[str, Any] = {"": self.root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._dynamic: dict[str, int] = {}  # number of anchors per name
        self._words: dict[int, dict[str, Any]] = {}
        self._targets: dict[int, list[Any]] = {}
        self._recursive: dict[int, bool] = {}
        # keeps ids unique: a freed schema's id could be reused
        self._kept: list[Any] = []
        self._look(self.root, Location("#", ""), 0)

    def pointer(self, schema: Any) -> str:
        """Return the JSON pointer of a schema."""
        return self._locations.get(id(schema), Location("#", "")).pointer

    def add(self, words: dict[str, Any], like: Any) -> dict[str, Any]:
        """Register a derived schema at the location of the schema `like`."""
        self._locations[id(words)] = self._locations.get(id(like), Location("#", ""))
        self._kept.append(words)
        return words

    def words(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return a schema's supported keywords; raise for invalid values."""
        if id(schema) not in self._words:
            self._words[id(schema)] = self._read_words(schema)
        return self._words[id(schema)]

    def _read_words(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        is_reference = self._is_old and "$ref" in schema
        for name, value in schema.items():
            if name not in keywords.SERVED:
                is_known = name in keywords.IGNORED or name.startswith("x-")
                if self._is_strict and not is_known:
                    raise Unsupported(f"keyword {name!r} at {self.pointer(schema)}")
                continue
            if is_reference and name != "$ref":
                continue  # up to draft 7 keywords beside $ref are ignored
            check, form = keywords.FORMS.get(name, (lambda _: True, ""))
            if not check(value):
                raise Malformed(
                    f"{name!r} at {self.pointer(schema)} must be {form}, not "
                    f"{_shorten(value)}"
                )
            found[name] = value
        if self._is_strict and found.get("format", "uuid") not in FORMATS:
            raise Unsupported(f"format {found['format']!r} at {self.pointer(schema)}")
        return found

    def target(self, schema: Mapping[str, Any], word: str) -> Any:
        """Return the schema at a reference; raise `Unsupported` if it is external."""
        reference = schema[word]
        where = f"{word} {reference!r} at {self.pointer(schema)}"
        if self._dynamic.get(f"{word} {reference.rpartition('#')[2]}", 0) > 1:
            raise Unsupported(f"{where}: several schemas have this anchor")
        base = self._locations.get(id(schema), Location("#", "")).base
        whole = base + reference if reference[:1] in "#" else _join(base, reference)
        uri, fragment = urllib.parse.urldefrag(whole)
        if uri not in self._resources:
            raise Unsupported(
                f"{where}: only references within the schema are supported"
            )
        found = self._resources[uri]
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((uri, urllib.parse.unquote(fragment)))
        elif fragment:
            found = self._follow(found, fragment)
        if not keywords.is_schema(found):
            raise Malformed(f"{where} does not point to a schema")
        if isinstance(found, dict) and id(found) not in self._locations:
            self._look(found, Location(f"#{fragment}", uri), 0)
        return found

    def _follow(self, found: Any, pointer: str) -> Any:
        for part in pointer.split("/")[1:]:
            key = urllib.parse.unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                return None
        return found

    def is_recursive(self, schema: Any) -> bool:
        """Return True if references lead from a schema back to itself."""
        if id(schema) not in self._recursive:
            seen: set[int] = set()
            newest = self._direct_targets(schema)
            while newest and id(schema) not in seen:
                one = newest.pop()
                if id(one) not in seen:
                    seen.add(id(one))
                    newest = newest + self._direct_targets(one)
            self._recursive[id(schema)] = id(schema) in seen
        return self._recursive[id(schema)]

    def _direct_targets(self, schema: Any) -> list[Any]:
        if not isinstance(schema, dict):
            return []
        if id(schema) not in self._targets:
            self._targets[id(schema)] = found = []
            for word in _REFERENCES:
                if isinstance(schema.get(word), str):
                    try:
                        found.append(self.target(schema, word))
                    except Unsupported:
                        continue  # raised when the reference is compiled
            for _, inner in _parts(schema, with_definitions=False):
                found += self._direct_targets(inner)
        return self._targets[id(schema)]

    def _look(self, schema: Any, location: Location, level: int) -> None:
        """Record the locations, ids and anchors of a schema and its parts."""
        if not isinstance(schema, dict):
            return
        if level > MAX_LEVELS:
            where = location.pointer
            raise TooLarge(f"schemas are nested too deeply at {where}")
        name = schema.get(self._id)
        if isinstance(name, str) and not (self._is_old and "$ref" in schema):
            uri, fragment = urllib.parse.urldefrag(_join(location.base, name))
            if fragment:
                self._anchors[uri, fragment] = schema
            if uri and uri != location.base:
                location = location._replace(base=uri)
                self._resources.setdefault(uri, schema)
        self._locations[id(schema)] = location
        for word in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(word), str):
                self._anchors[location.base, schema[word]] = schema
        for word, anchor in (
            ("$dynamicRef", schema.get("$dynamicAnchor")),
            ("$recursiveRef", "" if schema.get("$recursiveAnchor") is True else None),
        ):
            if isinstance(anchor, str):
                kind = f"{word} {anchor}"
                self._dynamic[kind] = self._dynamic.get(kind, 0) + 1
        for path, inner in _parts(schema):
            pointer = "/".join(
                part.replace("~", "~0").replace("/", "~1") for part in path
            )
            below = location._replace(pointer=f"{location.pointer}/{pointer}")
            self._look(inner, below, level + 1)


def _parts(
    schema: Mapping[str, Any], *, with_definitions: bool = True
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the direct subschemas of a schema, each with its path."""
    for word, value in schema.items():
        if word in keywords.SCHEMA_WORDS and isinstance(value, Mapping):
            yield (word,), value
        elif word in keywords.LIST_WORDS and isinstance(value, list):
            yield from (((word, str(i)), part) for i, part in enumerate(value))
        elif word in keywords.MAP_WORDS and isinstance(value, Mapping):
            if with_definitions or word not in ("$defs", "definitions"):
                yield from (((word, key), part) for key, part in value.items())


def _copy(root: Any) -> Any:
    try:
        return json.loads(json.dumps(root))
    except (TypeError, ValueError) as error:
        raise Malformed(f"schema is not JSON: {error}") from error
    except RecursionError as error:
        raise TooLarge("schema is nested too deeply") from error


def _join(base: str, reference: str) -> str:
    try:
        return urllib.parse.urljoin(base, reference)
    except ValueError:
        return reference


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
