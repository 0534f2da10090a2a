"""One table of what runs on which mesh; the page has it, and each cell is run here."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.mesh_table import (
    PLAYS,
    PROMPTS,
    assert_alike,
    make_caches,
    run_row,
)
from support.paths import ROOT
from support.small_attention_model import attention_params

import jkv

pytestmark = pytest.mark.one_end

AXES = {
    "heads": dict(heads="tp"),
    "context": dict(context="cp"),
    "heads and context": dict(heads="tp", context="cp"),
}
SIZES = {"tp": 2, "cp": 2, "dp": 2}


@functools.cache
def alone(row):
    """What one device gives."""
    return run_row(row, make_caches(row), attention_params())


def make_mesh(*names):
    sizes = [SIZES[name] for name in names]
    devices = np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return jax.sharding.Mesh(devices, names, (AxisType.Auto,) * len(names))


# One cell in every run; the others are further ones, each with programs of its own.
@pytest.mark.parametrize("column", AXES)
@pytest.mark.parametrize(
    "row",
    [
        each if each == "score" else pytest.param(each, marks=pytest.mark.further)
        for each in PLAYS
    ],
)
def test_a_cell_gives_what_one_device_gives(row, column):
    where = AXES[column]
    mesh = make_mesh(*where.values())
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = jax.device_put(attention_params(), everywhere)
    if "heads" in where:
        by_heads = NamedSharding(mesh, PartitionSpec(None, None, "tp"))
        layers = jax.device_put(params["layers"], by_heads)
        params = params | {"layers": layers}
    found = run_row(row, make_caches(row, mesh=mesh, **where), params)
    assert_alike(row, found, alone(row))


@pytest.mark.further
@pytest.mark.parametrize("row", [each for each in PLAYS if "score" not in each])
def test_each_rank_with_a_pool_gives_what_one_device_gives(row):
    mesh = make_mesh("dp")
    caches = make_caches(row, mesh=mesh, pools="dp")

    def step(cache, other, prompts, *, params):
        return cache, PLAYS[row]((cache, other), prompts, params)

    if len(caches) == 1:

        def step(cache, prompts, *, params):
            return cache, PLAYS[row]((cache,), prompts, params)

    everywhere = NamedSharding(mesh, PartitionSpec())
    params = jax.device_put(attention_params(), everywhere)
    prompts = np.stack([PROMPTS, PROMPTS])
    _, found = jax.jit(jkv.over_pools(step))(*caches, prompts, params=params)
    for rank in range(2):
        leaves = [np.asarray(leaf)[rank] for leaf in jax.tree.leaves(found)]
        assert_alike(row, leaves, alone(row))


def test_the_page_has_every_row_and_no_empty_cell():
    page = (ROOT / "docs" / "how-to" / "devices.md").read_text()
    table = page.split("## What runs on which mesh")[1].split("\n## ")[0]
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*\|$", table, re.MULTILINE)
    ]
    heads, _, *rows = rows
    assert all(cell for row in rows for cell in row)
    assert {len(row) for row in rows} == {len(heads)}
    assert {row[0] for row in rows} >= PLAYS.keys()
