"""Damaged copies of a config.json: each key is removed, or has another type."""

REMOVED = object()
DAMAGES = ("?", REMOVED, None, -1, [])


def list_damaged(raw, damages=DAMAGES):
    """Yield a key, its new value or `REMOVED`, and the file; also for nested keys."""
    for key, value in raw.items():
        if isinstance(value, dict):
            for name, damage, part in list_damaged(value, damages):
                yield name, damage, {**raw, key: part}
        for damage in damages:
            rest = {name: value for name, value in raw.items() if name != key}
            yield key, damage, rest if damage is REMOVED else {**raw, key: damage}


def assert_explained(error, key, damage):
    """Assert that an error names the key, or a setting or tensor beside it.

    These may contradict the default of a key that is null or missing.
    """
    message = str(error)
    is_missing = damage is REMOVED or damage is None
    is_about_others = "config.json" in message or "tensor" in message
    assert key in message or (is_missing and is_about_others), (key, message)
