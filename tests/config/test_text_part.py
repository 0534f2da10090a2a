"""Defaults of config.json, compared with the installed transformers."""

import importlib.util

import pytest

from jkv.config.families import FAMILIES

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="no transformers"
    ),
]


@pytest.mark.parametrize("model_type", [t for t, f in FAMILIES.items() if f.sizes])
def test_default_sizes_equal_transformers(model_type):
    from transformers import CONFIG_MAPPING

    defaults = CONFIG_MAPPING[model_type]()
    own = FAMILIES[model_type].sizes.settings
    assert own == {size: getattr(defaults, size) for size in own}


@pytest.mark.parametrize("model_type", [t for t, f in FAMILIES.items() if f.usual])
def test_default_settings_equal_transformers(model_type):
    """If a window is off by default, its length is in the class's signature."""
    from transformers import CONFIG_MAPPING

    own = FAMILIES[model_type].usual
    switched = {"use_sliding_window": True} if "use_sliding_window" in own else {}
    defaults = CONFIG_MAPPING[model_type](**switched).to_dict()
    assert {name: defaults[name] for name in own} == own | switched
