"""The documented table of six windowed models is computed from their sizes."""

import re

import pytest
from support.paths import ROOT

import jkv

pytestmark = pytest.mark.one_end

# From each public config.json: layers, windowed layers, window, maximum context, kv
# heads, head dim.
MODELS = {
    "Llama 3.1 8B": (32, 0, None, 131072, 8, 128),
    "Mistral 7B 0.1": (32, 32, 4096, 32768, 8, 128),
    "Gemma 2 9B": (42, 21, 4096, 8192, 8, 256),
    "Gemma 3 27B": (62, 52, 1024, 131072, 16, 128),
    "gpt-oss 20B": (24, 12, 128, 131072, 8, 64),
    "gpt-oss 120B": (36, 18, 128, 131072, 8, 64),
}


def pages_row(name):
    page = (ROOT / "docs" / "how-to" / "sliding-window.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", page, re.MULTILINE)
    return [cell.strip().replace(",", "") for cell in row.split("|")]


@pytest.mark.parametrize("name", MODELS)
def test_the_model_table_equals_cache_bytes(name):
    layers, num_windowed, window, context, heads, dim = MODELS[name]
    windows = [window] * num_windowed + [None] * (layers - num_windowed)

    def count_gib(layer_windows):
        config = jkv.GroupedConfig.for_context_length(
            context,
            max_sequences=1,
            layer_windows=layer_windows,
            num_kv_heads=heads,
            head_dim=dim,
        )
        stored = sum(
            group.bytes_per_token * group.num_blocks * group.block_size
            for group in config.groups
        )
        return stored / 2**30

    of_layers = f"{layers} {num_windowed or 'none'}"
    each = 2 * heads * dim * 2
    assert pages_row(name)[:4] == [
        of_layers,
        str(window or ""),
        str(context),
        str(each),
    ]
    for cell, layer_windows in zip(
        pages_row(name)[4:], ([None] * layers, windows), strict=True
    ):
        digits = len(cell.split()[0].partition(".")[2])
        assert f"{count_gib(layer_windows):.{digits}f} GiB" == cell
