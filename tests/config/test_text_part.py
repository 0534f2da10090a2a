"""Sizes that a config.json leaves out, beside those of the installed transformers."""

import importlib.util

import pytest

from jkv.config.text_part import LEFT_OUT, SIZES

pytestmark = [
    pytest.mark.one_end,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="no transformers"
    ),
]


@pytest.mark.parametrize("model_type", LEFT_OUT)
def test_sizes_left_out_are_those_of_transformers(model_type):
    from transformers import CONFIG_MAPPING

    defaults = CONFIG_MAPPING[model_type]()
    expected = {size: getattr(defaults, size) for size in SIZES}
    assert dict(zip(SIZES, LEFT_OUT[model_type], strict=True)) == expected
