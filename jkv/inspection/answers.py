"""Answers of verbs in debug mode: they remember whether the status was looked at."""

import dataclasses
import functools
from typing import Any

import jax

from jkv.inspection.findings import Site, Watch
from jkv.state import Batch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WatchedBatch(Batch):
    """A batch planned in debug mode."""

    stamp: jax.Array  # u32[], the clock after the call
    created: jax.Array  # u32[B], when each sequence was opened
    watch: Watch
    site: Site

    def __getattribute__(self, name: str) -> Any:
        """Remember that the status was looked at."""
        if name == "status":
            object.__getattribute__(self, "site").is_seen = True
        return object.__getattribute__(self, name)


_STATIC = ("is_decoding", "sizes", "watch", "site")
_ARRAYS = tuple(
    field.name
    for field in dataclasses.fields(WatchedBatch)
    if field.name not in _STATIC
)


def _flatten(batch: WatchedBatch) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    """Take a batch apart without looking at its status."""
    get = object.__getattribute__
    arrays = [(jax.tree_util.GetAttrKey(n), get(batch, n)) for n in _ARRAYS]
    return arrays, tuple(get(batch, name) for name in _STATIC)


def _unflatten(static: tuple[Any, ...], arrays: Any) -> WatchedBatch:
    fields = dict(zip(_ARRAYS, arrays, strict=True))
    return WatchedBatch(**fields, **dict(zip(_STATIC, static, strict=True)))


jax.tree_util.register_pytree_with_keys(WatchedBatch, _flatten, _unflatten)


def as_plain_batch(batch: Batch) -> Batch:
    """Return the batch as one that is not watched, without looking at its status."""
    names = [field.name for field in dataclasses.fields(Batch)]
    return Batch(**{name: object.__getattribute__(batch, name) for name in names})


@functools.cache
def watched_kind(kind: Any) -> Any:
    """Return a kind of named tuple that remembers whether its status was looked at."""

    class Watched(kind):  # type: ignore[misc]  # known at run time only
        site: Site

        @classmethod
        def of(cls, parts: Any, site: Site) -> Any:
            """Make one of its parts."""
            result = tuple.__new__(cls, tuple.__iter__(tuple(parts)))
            result.site = site
            return result

        @property
        def status(self) -> Any:
            """What the verb answered each request."""
            return self[kind._fields.index("status")]

        def __iter__(self) -> Any:
            self.site.is_seen = True
            return tuple.__iter__(self)

        def __getitem__(self, index: Any) -> Any:
            self.site.is_seen = True
            return tuple.__getitem__(self, index)

    Watched.__name__ = Watched.__qualname__ = kind.__name__
    jax.tree_util.register_pytree_node(
        Watched,
        lambda result: (tuple(tuple.__iter__(result)), result.site),
        lambda site, parts: Watched.of(parts, site),
    )
    return Watched
