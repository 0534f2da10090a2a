"""What does not take a cache of groups, and what to do instead."""

from typing import NoReturn

from jkv.status import UsageError

# What is about one pool is asked of one group; what changes it is put back.
_ONE = "pass one of cache.groups, {each}"
_EACH = (
    "call it with each of cache.groups, {each}, and put what it returns in their "
    "places with cache.with_groups"
)
_INSTEAD = {
    "clear_prefixes": "groups of layers find no prompts again",
    "debug": "it watches no groups of layers; look for mistakes in one cache of all "
    "layers (CacheConfig)",
    "evict": "it would close sequences in one group alone; free those that "
    "jkv.least_recently_used names until jkv.can_allocate says that there is room",
    "evict_cached": "groups of layers find no prompts again",
    "evict_older_than": "it would close sequences in one group alone; free those that "
    "jkv.least_recently_used names",
    "invalidate": "groups of layers find no prompts again",
    "match": "groups of layers find no prompts again",
    "resize": _EACH,
    "save": "save each of cache.groups, {each}, in a file of its own, and put what "
    "load returns in their places with cache.with_groups",
}


def refuse_groups(name: str, num_groups: int, *, runs_model: bool) -> NoReturn:
    """Say what to do instead of a public function.

    Args:
      name: of the function.
      num_groups: of the cache that it was given.
      runs_model: whether it is a loop around a model.
    """
    if runs_model:
        raise UsageError(
            f"{name} does not take groups of layers: step with append, the model and "
            f"free, or keep all layers in one cache"
        )
    each = f"the caches of {num_groups} groups of layers"
    raise UsageError(
        f"{name} takes one cache: {_INSTEAD.get(name, _ONE).format(each=each)}"
    )
