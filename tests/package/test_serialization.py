"""Programs on caches are serialized and deserialized by `jax.export`."""

import chex
import jax
import numpy as np
import pytest
from jax import export
from support.small_caches import copied, opened, small_config
from support.states.folding_model import KINDS, make_config

import jkv
from jkv import decoding, serialization
from jkv.attention.kernel.work import lists

LEAF = jax.ShapeDtypeStruct((2,), np.int32)


def kept(function, *given):
    """Return a function exported for these arguments, serialized and deserialized."""
    return export.deserialize(export.export(jax.jit(function))(*given).serialize())


def test_an_exported_step_is_bit_identical():
    def step(cache, rows):
        cache, batch = jkv.append(cache, np.array([0, -1], np.int32))
        cache = jkv.write(cache, 0, batch, rows, rows)
        return jkv.commit(cache, batch), batch, jkv.attend(cache, 0, batch, rows)

    cache, rows = opened(3, 3), np.ones((2, 1, 2), np.float32)
    expected = jax.jit(step)(cache, rows)
    found = kept(step, cache, rows).call(copied(cache), rows)
    assert isinstance(found[0], jkv.Cache) and isinstance(found[1], jkv.Batch)
    assert found[1].sizes == expected[1].sizes
    assert found[1].sizes.groups[0].num_blocks == expected[0].storage[0].num_blocks
    chex.assert_trees_all_equal(found, expected)
    jkv.check(found[0])


def fill(node, **static):
    """Return a node with the same leaf in each dynamic field."""
    names = {field.name for field in node.__dataclass_fields__.values()}
    return node(**dict.fromkeys(names - static.keys(), LEAF), **static)


def make_masks():
    """Return one of each mask class, some with static fields."""
    rows = np.array([-1], np.int32)
    spans = jkv.SpanMask(rows, rows, one_window=True, cacheable=True)
    others = jkv.CausalMask(), jkv.TreeMask(rows)
    return [spans, *others, jkv.MixedMask(rows, (spans, *others))]


def make_trees():
    """Return each kind of node as shapes, and caches of many kinds."""
    work = lists.Work(*[LEAF] * len(lists.Work._fields))
    return {
        "caches": [
            jax.eval_shape(lambda c=config: jkv.init(c))
            for config in (
                *(make_config(kind, pending=3) for kind in KINDS),
                small_config(dtype="int8", record_tokens=True, values_in_keys=True),
                small_config(pruning=True, observed_queries=2),
                jkv.GroupedConfig(
                    groups=(small_config(), small_config(sliding_window=5)),
                    layer_groups=(0, 1),
                    prefix_caching=True,
                ),
            )
        ],
        "step": jax.eval_shape(lambda c: jkv.append(c, [0]), opened(3))[1],
        "masks": jax.eval_shape(make_masks),
        "masked step": jax.eval_shape(
            lambda c: jkv.append(c, [0], mask=jkv.TreeMask(np.array([-1]))), opened(3)
        )[1],
        "lists": [
            fill(lists.WorkList, work=work, sizes=sizes)
            for sizes in (
                lists.DecodeSizes(1, 2, 3, 4, 5, True),
                lists.PrefillSizes(1, 2, 3),
                lists.PositionSizes(1, 2, 3, 4, 5),
            )
        ],
        "options": [jkv.Sampling(temperature=0.5), jkv.PromptLookup(cost=3.0)],
        "results": [
            *(node(*[LEAF] * len(node._fields)) for node in serialization.NAMED_TUPLES),
            decoding.Statistics(LEAF),
        ],
    }


def node_types(tree):
    """Return the types of all nodes of a tree structure."""
    found = tree.node_data()
    below = (node_types(child) for child in tree.children())
    return set().union(() if found is None else {found[0]}, *below)


def test_all_nodes_round_trip():
    trees = make_trees()
    structure = jax.tree.structure(((trees,), {}))
    nodes = serialization.DATACLASSES + serialization.NAMED_TUPLES
    assert node_types(structure) >= {*nodes}, "each is among the trees"
    assert kept(lambda trees: trees, trees).in_tree == structure


@pytest.mark.one_end
def test_unserializable_caches_are_refused_with_a_reason():
    mesh = jax.make_mesh((1,), ("dp",))
    cache = jkv.init(small_config(), pools="dp", mesh=mesh)
    with pytest.raises(jkv.UsageError, match=r"PoolSharding.*jax\.tree\.leaves"):
        kept(lambda cache: cache, cache)


@pytest.mark.one_end
def test_a_program_with_other_fields_is_refused():
    with pytest.raises(jkv.UsageError, match="with this version of jkv"):
        serialization._reader(jkv.Ring)(b'{"size": 3}')


@pytest.mark.one_end
def test_a_symbolic_number_of_requests_is_refused():
    """Every verb needs a static number of requests."""
    (count,) = export.symbolic_shape("count")
    ids = jax.ShapeDtypeStruct((count,), np.int32)
    for verb in (jkv.allocate, jkv.append, jkv.free, jkv.fork, jkv.touch):
        with pytest.raises(jkv.UsageError, match=r"symbolic.*export for the largest"):
            export.export(jax.jit(verb))(opened(3), ids)
    with pytest.raises(jkv.UsageError, match=r"symbolic.*export for the largest"):
        export.export(jax.jit(jkv.match))(
            opened(3, prefix_caching=True), jax.ShapeDtypeStruct((count, 4), np.int32)
        )
