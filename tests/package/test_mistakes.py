"""Common mistakes raise errors immediately, with the fix."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jax_versions import few
from support.small_caches import (
    ROWS,
    WIDTH,
    append,
    copied,
    opened,
    small_cache,
    small_config,
)
from support.small_caches import prompts as padded

import jkv
from jkv.decoding import begin, decode, prefill
from jkv.decoding.sequences.prompts import Stops, as_stop_sequences

VOCABULARY = 7
ONE_SIZE = dict(row_counts=(4,))  # of all steps: a model is traced once


@functools.cache
def stepped(**changes):
    """Return a cache with two sequences of three tokens, and the next batch."""
    cache = opened(3, 3, **changes)
    return jkv.append(cache, np.array([0, 1], np.int32))


def rows(cache, batch, dtype=np.float32, heads=1):
    """Return rows of keys, values or queries for a batch."""
    return np.ones((batch.num_rows, heads, cache.head_dim), dtype)


@pytest.mark.one_end
class TestModels:
    """A model returns one row of logits per sequence, and the cache."""

    def generate(self, model, prompts=((1, 2, 3), (4,)), **options):
        cache, options = small_cache(), ONE_SIZE | options
        shapes = jax.eval_shape(
            lambda cache: jkv.generate(
                model, None, cache, prompts, max_new_tokens=2, **options
            ),
            cache,
        )
        return shapes[1]

    @staticmethod
    def all_rows(_params, tokens, cache, _batch):
        return jax.nn.one_hot(tokens, VOCABULARY), cache

    @staticmethod
    def last_rows(_params, tokens, cache, batch):
        return jax.nn.one_hot(tokens, VOCABULARY)[batch.last_rows], cache

    @pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[1, 2, 3], [4]]])
    def test_all_rows_instead_of_the_last_ones(self, prompts):
        with pytest.raises(ValueError, match=r"\[B, V\].*batch\.last_rows") as caught:
            self.generate(self.all_rows, prompts)
        assert f"with B = {len(prompts)}, " in str(caught.value)

    def test_all_rows_of_a_chunk_as_large_as_the_batch(self):
        with pytest.raises(ValueError, match=r"batch\.last_rows"):
            self.generate(self.all_rows, chunk_size=2, row_counts=None)

    def test_logits_without_the_sequence_axis(self):
        def one_row(_params, _tokens, cache, _batch):
            return jnp.zeros((VOCABULARY,)), cache

        with pytest.raises(ValueError, match=r"float\[B, V\].*got float32\[7\]"):
            self.generate(one_row)

    def test_tokens_instead_of_logits(self):
        def chosen(_params, _tokens, cache, _batch):
            return jnp.zeros((2, VOCABULARY), jnp.int32), cache

        with pytest.raises(ValueError, match=r"float\[B, V\].*got int32"):
            self.generate(chosen)

    @pytest.mark.parametrize(
        "answer", [lambda cache, logits: (cache, logits), lambda _, logits: logits]
    )
    def test_a_result_other_than_logits_and_cache(self, answer):
        def model(_params, _tokens, cache, _batch):
            return answer(cache, jnp.zeros((2, VOCABULARY)))

        with pytest.raises(ValueError, match=r"\(logits, cache\), .* got"):
            self.generate(model)

    def test_decode_validates_the_model(self):
        cache, state = jax.eval_shape(
            lambda cache: prefill(
                self.last_rows, None, cache, [[1, 2, 3]], max_new_tokens=2, **ONE_SIZE
            ),
            small_cache(),
        )

        def two_rows(_params, _tokens, cache, _batch):
            return jnp.zeros((2, VOCABULARY)), cache

        with pytest.raises(ValueError, match=r"\[B, V\] with B = 1"):
            jax.eval_shape(lambda *args: decode(two_rows, None, *args), cache, state)

    @pytest.mark.parametrize(
        "prompts",
        [
            [[1, 2, 3], [4, 5, 6]],
            [[1, 2, 3], [4]],
            ((1, 2, 3), range(2)),
            [np.array([1, 2, 3]), jnp.array([4])],
            np.array([[1, 2, 3], [4, -1, -1]]),
            np.array([[1, 2, 3], [4, 255, 255]], np.uint8),
        ],
    )
    def test_prompts_may_be_lists_or_arrays_of_integers(self, prompts):
        result = self.generate(self.last_rows, prompts)
        assert result.tokens.shape == (2, 2)

    @pytest.mark.one_end
    def test_a_list_equals_its_padded_array(self):
        """The states before the first step are equal."""
        options = dict(max_new_tokens=2, **ONE_SIZE)
        start = functools.partial(begin, self.last_rows, None, small_cache(), **options)
        padded = np.array([[1, 2, 3], [4, -1, -1]], np.int32)
        listed, given = map(jax.jit(start), ([[1, 2, 3], [4]], padded))
        assert given.prompts.tokens.tolist() == padded.tolist()
        assert jax.tree.all(jax.tree.map(np.array_equal, listed, given))

    def test_ragged_lists_may_be_traced(self):
        cache = small_cache()
        found = jax.eval_shape(
            lambda prompts: jkv.generate(
                self.last_rows, None, cache, prompts, max_new_tokens=2, **ONE_SIZE
            ),
            [[1, 2, 3], [4]],
        )
        assert found[1].tokens.shape == (2, 2)

    @pytest.mark.parametrize("prompts", [[1, 2], [[1.0]], [[[1]]], "text", None, []])
    def test_prompts_of_wrong_types(self, prompts):
        with pytest.raises(ValueError, match="prompts"):
            self.generate(self.last_rows, prompts)


@pytest.mark.one_end
class TestPrompts:
    """A prompt is known token ids followed by padding."""

    WRONG = {
        "padding between tokens": [1, -1, 3],
        "padding on the left": [-1, 1, 3],
        "an id below -1": [1, -2, -1],
        "an id past the vocabulary": [1, VOCABULARY, -1],
    }

    @pytest.fixture(params=["generate", "extend", "beam_search"])
    def loop(self, request):
        """A loop over prompts."""
        cache = opened(0, 0, 0, 0)
        options = dict(max_new_tokens=2, chunk_size=4)
        model = TestModels.last_rows
        if request.param == "extend":
            ids = np.arange(4, dtype=np.int32)
            return lambda prompts: jkv.extend(
                model, None, cache, ids[: len(prompts)], prompts, **options
            )
        if request.param == "beam_search":
            options["num_beams"] = 1
        call = getattr(jkv, request.param)
        return lambda prompts: call(model, None, small_cache(), prompts, **options)

    @pytest.mark.parametrize("wrong", WRONG)
    def test_are_refused_outside_of_jit(self, loop, wrong):
        prompts = [[1, 2, 3], self.WRONG[wrong]]
        with pytest.raises(ValueError, match="prompt 1 has .* past its end only"):
            loop(prompts)

    def test_have_their_own_reason_in_jit(self):
        """All loops validate prompts alike."""
        prompts = np.array([*self.WRONG.values()], np.int32)
        start = functools.partial(begin, TestModels.last_rows, None, small_cache())
        state = jax.jit(functools.partial(start, max_new_tokens=2))(prompts)
        reasons = {jkv.FinishReason(each).name for each in state.result.reasons}
        assert reasons == {"MALFORMED_PROMPT"}


@pytest.mark.one_end
class TestOptions:
    """An option of a wrong type raises an error with the expected type."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (dict(sampling=0.7), r"Sampling\(temperature=0.7\), got 0.7"),
            (dict(max_new_tokens=6.0), "max_new_tokens must be a static int"),
            (dict(max_new_tokens=np.int64(6)), r"pass int\(max_new_tokens\)"),
            (dict(row_counts=8), "row_counts must be a tuple of ints"),
            (dict(stop_tokens="x"), "stop_tokens must be token ids"),
            (dict(stop_sequences="x"), "stop_sequences must be"),
            (dict(stop_sequences=[[1], 2]), "stop_sequences must be"),
            (dict(stop_tokens=[[1, 2], [3]]), "stop_tokens must be .* lengths"),
            (dict(speculate=3), "a DraftModel or one of jkv.drafters"),
            (dict(speculate=jkv.PromptLookup), "got <class 'jkv"),
        ],
        ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
    )
    @pytest.mark.parametrize("room", [jkv, jkv.jitted], ids=["plain", "jitted"])
    def test_of_generate(self, options, message, room):
        cache, given = small_cache(), ONE_SIZE | dict(max_new_tokens=2) | options
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(
                lambda cache: room.generate(
                    TestModels.last_rows, None, cache, [[1, 2]], **given
                ),
                cache,
            )

    @pytest.mark.parametrize(
        "field",
        [
            dict(temperature="1"),
            dict(temperature=None),
            dict(temperature=True),
            dict(temperature=[0.5, "1"]),
            dict(temperature=[0.5, [1.0]]),
            dict(temperature=[0.5, -1.0]),
            dict(top_k=[1.5]),
            dict(top_p=dict()),
            dict(seeds=[2**40]),
        ],
        ids=str,
    )
    def test_of_sampling(self, field):
        (name,) = field
        with pytest.raises(jkv.UsageError, match=f"Sampling.{name} must be .*, got"):
            jkv.Sampling(**field)

    def test_stop_sequences_may_be_ragged_lists(self):
        """They equal their array, padded with -1."""
        rows = np.array([[1, 2], [3, -1]], np.int32)
        none = np.full((2, 2), -1, np.int32)
        for given, expected in (
            ([[1, 2], [3]], rows),
            ((range(1, 3), np.array([3])), rows),
            ([[[1, 2], [3]], []], np.stack([rows, none])),
            ([], np.zeros((0, 0), np.int32)),
            ((), np.zeros((0, 0), np.int32)),
        ):
            np.testing.assert_array_equal(as_stop_sequences(given), expected)
            found = Stops.of((), given, 2).sequences
            wanted = Stops.of((), expected, 2).sequences
            assert (found is None) == (wanted is None) == (0 in expected.shape)
            if found is not None:
                np.testing.assert_array_equal(found, wanted)
        # Traced, a list is an array per number.
        traced = jax.eval_shape(as_stop_sequences, [[1, 2], [3]])
        assert traced.shape == (2, 2)

    def test_chunks_without_rows(self):
        with pytest.raises(ValueError, match="chunk_size must be a static int"):
            jkv.extend(
                TestModels.last_rows,
                None,
                opened(0),
                [0],
                [[1]],
                max_new_tokens=2,
                chunk_size=0,
            )

    def test_model_and_params_swapped(self):
        with pytest.raises(ValueError, match=r"were they swapped\?\), got dict"):
            jkv.generate(
                {}, TestModels.last_rows, small_cache(), [[1]], max_new_tokens=2
            )

    def test_init_without_a_configuration(self):
        with pytest.raises(ValueError, match="config must be a jkv.CacheConfig"):
            jkv.init(dict(num_layers=1))

    def test_stacked_caches(self):
        stacked = jax.tree.map(lambda a: jnp.stack([a, a]), small_cache())
        with pytest.raises(ValueError, match=r"leading axes \[2\].*jax.vmap"):
            jkv.allocate(stacked, [1])

    def test_a_generation_has_no_status(self):
        result = jkv.Generation.empty(jnp.zeros(1, jnp.int32), 1)
        with pytest.raises(AttributeError, match="reasons"):
            _ = result.status
        with pytest.raises(ValueError, match="a generation has reasons"):
            jkv.raise_for_status(result)


class TestBatches:
    """A batch belongs to the cache that planned it."""

    @pytest.mark.parametrize(
        "changes",
        [
            dict(num_blocks=9),
            dict(block_size=2),
            dict(max_sequences=5),
            dict(max_context_length=13),
            dict(num_layers=2),
            dict(num_kv_heads=2),
            dict(head_dim=4),
            dict(value_head_dim=4),
        ],
        ids=lambda changes: next(iter(changes)),
    )
    @pytest.mark.one_end
    def test_the_batch_of_a_cache_with_other_sizes(self, changes):
        (name,) = changes
        _, batch = stepped()
        other = jax.eval_shape(lambda: jkv.init(small_config(**changes)))
        keys = np.ones((2, other.num_kv_heads, other.head_dim), np.float32)
        values = np.ones((2, other.num_kv_heads, other.value_head_dim), np.float32)
        calls = [
            lambda cache: jkv.write(cache, 0, batch, keys, values),
            lambda cache: jkv.attend(cache, 0, batch, keys),
        ]
        if name != "num_blocks":  # as after a `resize`
            calls.append(lambda cache: jkv.commit(cache, batch))
        for call in calls:
            with pytest.raises(ValueError, match=f"another cache.*{name} .* here"):
                jax.eval_shape(call, other)

    def test_a_rank_in_shard_map_may_have_a_part_of_the_heads(self):
        cache, batch = stepped()
        (group,) = batch.sizes.groups
        sizes = batch.sizes._replace(groups=(group._replace(num_kv_heads=2),))
        whole = dataclasses.replace(batch, sizes=sizes)
        queries = rows(cache, batch)
        with pytest.raises(ValueError, match="num_kv_heads 2 there and 1 here"):
            jkv.attend(cache, 0, whole, queries)
        everywhere = jax.sharding.PartitionSpec()
        attend = jax.shard_map(
            lambda queries: jkv.attend(cache, 0, whole, queries),
            mesh=jax.make_mesh((1,), ("tp",)),
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,
        )
        assert jax.eval_shape(attend, queries).shape == queries.shape


class TestRows:
    """Keys, values and queries are floats."""

    @pytest.mark.parametrize("dtype", [np.int32, np.int8, np.bool_])
    @pytest.mark.one_end
    def test_integer_keys_or_values(self, dtype):
        cache, batch = stepped()
        floats, others = rows(cache, batch), rows(cache, batch, dtype)
        with pytest.raises(ValueError, match="keys must be floating point"):
            jkv.write(cache, 0, batch, others, floats)
        with pytest.raises(ValueError, match="values must be floating point"):
            jkv.write(cache, 0, batch, floats, others)
        with pytest.raises(ValueError, match=r"queries must be float\[R, H, D\].* got"):
            jkv.attend(cache, 0, batch, others)

    @pytest.mark.parametrize(
        "dtype", few(["bfloat16", "int8", "float8_e4m3fn"], "int8")
    )
    def test_gradients_of_encoded_storage_are_refused(self, dtype):
        cache, batch = stepped(dtype=dtype)
        queries = rows(cache, batch)

        def loss(keys, stored):
            after = jkv.write(cache, 0, batch, stored, stored)
            return jkv.attend(after, 0, batch, queries * keys.sum()).sum()

        def stopped(keys):
            return loss(keys, jax.lax.stop_gradient(keys))

        for function in (loss, jax.jit(loss)):
            with pytest.raises(ValueError, match=f"{dtype}.*dtype='float32'"):
                jax.eval_shape(jax.grad(lambda k, f=function: f(k, k)), queries)
        # Neither a stopped gradient nor the queries' gradient depends on the storage.
        for function in (stopped, jax.jit(stopped)):
            found = jax.eval_shape(jax.grad(function), queries)
            assert found.shape == queries.shape


class TestCalls:
    """Swapped arguments, pairs that were not unpacked, values in jit."""

    def calls(self):
        cache, batch = stepped()
        keys = rows(cache, batch)
        return {
            "allocate": (0,),
            "append": (0,),
            "write": (0, batch, keys, keys),
            "attend": (0, batch, keys),
            "commit": (batch,),
            "fork": (0,),
            "free": (0,),
            "truncate": (0, 0),
            "reorder": (0, 0),
            "read": (0, 0),
            "touch": (0,),
            "match": ([[1]],),
            "block_ids": (0,),
            "num_free_blocks": (),
            "can_allocate": (0,),
            "stats": (),
            "check": (),
            "memory_profile": (),
            "fragmentation": (),
            "swap_out": (0,),
            "compact": (),
            "evict": (0,),
        }

    def test_the_pair_instead_of_the_cache(self):
        pair = stepped()
        for name, others in self.calls().items():
            verb = getattr(jkv, name)
            with pytest.raises(TypeError, match=f"{name}.*verbs return a pair"):
                verb(pair, *others)
            with pytest.raises(ValueError, match=f"{name}.*verbs return a pair"):
                jax.eval_shape(lambda pair, verb=verb, o=others: verb(pair, *o), pair)

    @pytest.mark.one_end
    def test_the_pair_instead_of_the_cache_in_generate(self):
        model = TestModels.last_rows
        with pytest.raises(TypeError, match=r"generate.*verbs return a pair"):
            jkv.generate(model, None, stepped(), [[1]], max_new_tokens=1)

    @pytest.mark.one_end
    def test_another_value_instead_of_the_cache(self):
        for name, others in self.calls().items():
            for wrong in ([0, 1], None, 3):
                with pytest.raises(TypeError, match=f"{name}.*cache must be a jkv.Cac"):
                    getattr(jkv, name)(wrong, *others)

    @pytest.mark.one_end
    def test_a_configuration_instead_of_the_cache(self):
        with pytest.raises(TypeError, match=r"jkv\.init\(config\)"):
            jkv.allocate(small_config(), 0)

    def test_a_missing_argument_is_reported_by_python(self):
        with pytest.raises(TypeError, match="missing.*'cache'"):
            jkv.stats()
        with pytest.raises(TypeError, match="missing.*'batch'"):
            jkv.commit(small_cache())

    @pytest.mark.one_end
    def test_swapped_layer_and_batch(self):
        cache, batch = stepped()
        keys = rows(cache, batch)
        for call in (
            lambda: jkv.write(cache, batch, 0, keys, keys),
            lambda: jkv.attend(cache, batch, 0, keys),
        ):
            with pytest.raises(TypeError, match=r"layer must be .* got Batch"):
                call()

    @pytest.mark.one_end
    def test_wrong_batches_and_rows_are_refused(self):
        cache, batch = stepped()
        keys = rows(cache, batch)
        with pytest.raises(TypeError, match=r"batch must be .* got float32\[2, 1, 2\]"):
            jkv.write(cache, 0, keys, batch, keys)
        with pytest.raises(TypeError, match="batch must be .* got int"):
            jkv.commit(cache, 0)
        with pytest.raises(TypeError, match="keys must be an array.* got Batch"):
            jkv.write(cache, 0, batch, batch, keys)
        with pytest.raises(TypeError, match="queries must be an array.* got list"):
            jkv.attend(cache, 0, batch, [1.0])
        with pytest.raises(TypeError, match="layer must be .* got float32"):
            jkv.write(cache, jnp.float32(0), batch, keys, keys)

    @pytest.mark.one_end
    def test_a_whole_result_instead_of_its_ids(self):
        cache, result = jkv.allocate(small_cache(), np.zeros(WIDTH, np.int32))
        for name in ("append", "free", "fork"):
            with pytest.raises(TypeError, match=r"Allocation.*its seq_ids"):
                getattr(jkv, name)(cache, result)

    @pytest.mark.one_end
    def test_raise_for_status_accepts_the_pair(self):
        pair = jkv.free(small_cache(), np.full(WIDTH, 9, np.int32))
        with pytest.raises(jkv.InvalidSequence, match="8 of 8 blocks free"):
            jkv.raise_for_status(pair)
        with pytest.raises(jkv.OutOfSequences):
            jkv.raise_for_status(jkv.allocate(small_cache(), [0] * 5))
        jkv.raise_for_status(stepped())

    @pytest.mark.one_end
    def test_raise_for_status_refuses_values_without_a_status(self):
        for wrong in (small_cache(), "OK", 0.5, np.zeros(2), None):
            with pytest.raises(TypeError, match="status must be"):
                jkv.raise_for_status(wrong)

    @pytest.mark.parametrize(
        "name", ["stats", "check", "memory_profile", "fragmentation", "should_compact"]
    )
    def test_host_functions_are_refused_inside_jit(self, name):
        with pytest.raises(TypeError, match=rf"{name}.*outside jit; .*batch\.status"):
            jax.eval_shape(getattr(jkv, name), small_cache())

    def test_raise_for_status_inside_jit(self):
        with pytest.raises(TypeError, match=r"outside jit; .*batch\.status"):
            jax.eval_shape(jkv.raise_for_status, np.zeros(2, np.int32))
        with pytest.raises(TypeError, match=r"outside jit; .*batch\.status"):
            jax.eval_shape(jkv.raise_for_status, stepped()[1])

    def test_a_donated_cache(self):
        cache, batch = stepped()
        gone = copied(cache)
        kept = jax.jit(lambda cache: cache, donate_argnums=0)(gone)
        calls = self.calls()
        for name in ("append", "write", "free", "num_free_blocks", "read", "stats"):
            with pytest.raises(ValueError, match=f"{name}.*was donated") as caught:
                getattr(jkv, name)(gone, *calls[name])
            assert caught.value.__cause__ is not None, "the cause is shown"
        jkv.check(kept)

    def test_other_errors_are_not_reported_as_donation(self):
        cache, batch = stepped()
        gone = jnp.ones((2, 1, 2))
        gone.delete()
        with pytest.raises((RuntimeError, ValueError)) as caught:
            jkv.write(cache, 0, batch, gone, gone)
        assert "donated to an earlier call" not in str(caught.value)

    @pytest.mark.one_end
    def test_more_tokens_than_rows_names_the_capacity(self):
        cache, batch = jkv.append(small_cache(), np.zeros(1, np.int32), 2)
        opened_cache = opened(3, 3)
        _, batch = jkv.append(opened_cache, [0, 1], [3, 3])
        with pytest.raises(jkv.BatchFull, match="capacity="):
            jkv.raise_for_status(batch)

    @pytest.mark.parametrize(
        ("wrong", "meant"),
        [
            ("memory", "budget"),
            ("budget", "budget_bytes"),
            ("num_kv_head", "num_kv_heads"),
            ("page_size", "block"),
        ],
    )
    @pytest.mark.one_end
    def test_an_unknown_field_suggests_the_right_one(self, tmp_path, wrong, meant):
        with pytest.raises(TypeError, match=f"'{wrong}'; the nearest is '{meant}"):
            jkv.CacheConfig.from_model(tmp_path, **{wrong: 1})
        with pytest.raises(TypeError, match=f"'{wrong}'; the nearest is '{meant}"):
            jkv.CacheConfig.for_memory(2**20, **{wrong: 1})
        with pytest.raises(TypeError, match=f"'{wrong}'; the nearest is '{meant}"):
            jkv.CacheConfig.for_context_length(16, **{wrong: 1})


class TestRepresentation:
    """`repr(cache)` never raises, whatever JAX puts in place of the arrays."""

    def fields(self, text):
        """Return the named arrays, one line each."""
        return dict(re.findall(r"^  ([\w.]+): (.*)$", text, re.MULTILINE))

    def test_of_shapes(self):
        text = repr(jax.eval_shape(lambda: jkv.init(small_config())))
        assert text.startswith("Cache(1 layers, 1 kv heads") and "\n" not in text

    def test_inside_vmap_and_of_a_stack(self):
        stack = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), small_cache())
        found = self.fields(repr(stack))
        assert found["storage.0.key_pool"] == "float32[2, 1, 8, 1, 4, 2]"
        assert found["metadata.sequences.rows"] == "int32[2, 4, 5]"

        texts = []
        jax.eval_shape(jax.vmap(lambda cache: texts.append(repr(cache))), stack)
        assert texts[0].startswith("Cache(1 layers, 1 kv heads")

    @pytest.mark.parametrize("leaf", [jax.sharding.PartitionSpec("tp"), 3, "x"])
    def test_of_a_tree_of_any_leaves(self, leaf):
        text = repr(jax.tree.map(lambda _: leaf, small_cache()))
        assert self.fields(text)["storage.0.key_pool"] == repr(leaf)

    def test_of_an_empty_cache(self):
        for nothing in (None, 3):
            cache = jax.tree.map(
                lambda _, nothing=nothing: nothing,
                small_cache(),
                is_leaf=lambda part: isinstance(part, jkv.Metadata),
            )
            assert repr(cache).startswith("Cache(")

    def test_of_a_donated_cache(self):
        gone = copied(small_cache())
        jax.tree.map(lambda leaf: leaf.delete(), gone)
        assert "1 layers" in repr(gone)


def test_ids_and_counts_may_have_any_integer_type():
    cache = opened(3, 3)
    expected = jax.tree.leaves(jkv.append(cache, [0, 1], [1, 1], capacity=ROWS)[1])
    for ids, counts in (
        (range(2), (1, 1)),
        ((0, 1), np.array([1, 1], np.uint8)),
        (np.array([0, 1], np.int64), [np.int64(1), np.uint16(1)]),
        (jnp.array([0, 1], jnp.uint32), np.int16(1)),
        ([np.int32(0), np.int32(1)], jnp.int8(1)),
    ):
        _, batch = jkv.append(cache, ids, counts, capacity=ROWS)
        for found, wanted in zip(jax.tree.leaves(batch), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


class TestCounts:
    """All counts accept Python ints up to 2**32 - 1; too large means all."""

    most = 2**32 - 1

    def test_of_tokens_blocks_and_ticks(self):
        cache, many = opened(3, 3), np.full(WIDTH, self.most)
        status = jkv.allocate(cache, many)[1].status
        assert set(status.tolist()) == {jkv.Status.CONTEXT_FULL}
        assert jkv.can_allocate(cache, [self.most]).tolist() == [False]
        evicted = jkv.evict(cache, self.most)[1]
        assert evicted.tolist() == [0, 1, -1, -1]
        assert jkv.evict_older_than(cache, self.most)[1].tolist() == [-1] * 4
        assert jkv.evict_older_than(cache, np.uint32(0))[1].tolist() == [0, -1, -1, -1]
        assert jkv.block_ids(cache, self.most).tolist() == [8] * 4
        assert not jkv.block_info(cache, np.uint32(self.most)).is_free

    @pytest.mark.one_end
    def test_of_steps_and_limits(self):
        model, cache = TestModels.last_rows, small_cache()
        options = dict(max_new_tokens=2, limits=[self.most, 1], **ONE_SIZE)
        state = begin(model, None, cache, [[1, 2, 3], [4]], **options)
        _, state = decode(model, None, cache, state, num_steps=self.most)
        assert state.result.lengths.tolist() == [2, 1]

    @pytest.mark.one_end
    def test_floats_are_not_counts(self):
        for verb in (jkv.evict, jkv.block_ids):
            with pytest.raises(TypeError, match="integer, got 2.5"):
                verb(small_cache(), 2.5)

    @pytest.mark.one_end
    def test_salts_are_signed_or_unsigned_32_bit_integers(self):
        cache = small_cache(prefix_caching=True)
        prompt = padded([range(9)])
        none = np.zeros(WIDTH, np.int32)
        cache, _ = jkv.allocate(cache, none, tokens=padded([]), salts=self.most)
        cache, step = append(cache, 0, 9, tokens=range(9))
        cache = jkv.commit(cache, step.batch)
        for salts in (self.most, -1, np.uint32(self.most), jnp.uint32(self.most)):
            assert jkv.match(cache, prompt, salts).tolist() == [8, 0, 0, 0]
        assert not jkv.match(cache, prompt, 2**31 - 1).any()
        assert not jkv.match(cache, prompt, self.most - 1).any()
        with pytest.raises(ValueError, match="salts must fit in 32 bits"):
            jkv.match(cache, prompt, 2**32)
        forgotten = jkv.invalidate(cache, self.most)
        assert not jkv.match(forgotten, prompt, -1).any()


@pytest.mark.one_end
def test_context_lengths_outlive_the_cache():
    cache = copied(opened(3, 5))
    lengths = jkv.context_lengths(cache)
    jax.tree.map(lambda leaf: leaf.delete(), cache)
    assert lengths.tolist() == [3, 5, 0, 0]


@pytest.mark.one_end
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_query_length=0), "max_query_length must be .* at least 1 .*got 0"),
        (dict(capacity=-1), "capacity must be a static int of at least 0"),
        (dict(capacity=np.int64(4)), r"capacity must be .*pass int\(capacity\)"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_sizes_of_a_step(options, message):
    with pytest.raises(ValueError, match=message):
        jkv.append(small_cache(), [0, 1], 1, **options)
