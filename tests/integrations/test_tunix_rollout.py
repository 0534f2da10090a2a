"""JkvRollout, compared with Tunix's own engine, and used like its trainer does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from jax.sharding import Mesh
from support.models.tunix_models import (
    EOS,
    MODELS,
    PAD,
    Alphabet,
    make_model,
    make_vanilla,
    options,
    shake,
)
from tunix.rl import common
from tunix.rl import utils as rl_utils
from tunix.rl.rollout import base_rollout

from jkv.integrations.tunix import JkvRollout
from jkv.integrations.tunix.weights import put_module, update

# Nine tokens, including the beginning-of-sequence token.
PROMPTS = ["to be or", "not to b", "that is ", "to be or"]
SHORTER = ["to be or", "not", "that is", "to be or"]
TOLERANCE = 2e-5  # float32 logprobs summed in another order


def padded(rows, width=12):
    return np.array([[*row, *[PAD] * (width - len(row))] for row in rows])


def assert_same(ours, theirs):
    for our_row, their_row in zip(ours.tokens, theirs.tokens, strict=True):
        assert our_row.tolist() == their_row.tolist()
    assert ours.text == theirs.text
    np.testing.assert_array_equal(
        ours.left_padded_prompt_tokens, theirs.left_padded_prompt_tokens
    )
    for our_row, their_row in zip(ours.logprobs, theirs.logprobs, strict=True):
        np.testing.assert_allclose(our_row, their_row, atol=TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logprobs_equal_vanilla(name):
    """Two sequences run at a time in the pool, and wait for blocks."""
    module = make_model(name)
    # Tunix measures Gemma 2's window from the first column, including padding.
    prompts = PROMPTS if name == "gemma2" else SHORTER
    theirs = make_vanilla(module).generate(prompts, options())
    assert all(PAD not in row for row in theirs.tokens)
    assert len(set(np.concatenate(theirs.tokens).tolist())) > 5
    assert np.std(np.concatenate(theirs.logprobs)) > 0.1

    sizes = dict(block_size=4, num_blocks=9, max_running=2, chunk_size=2)
    rollout = JkvRollout(module, Alphabet(), **sizes, prefix_caching=False)
    assert_same(rollout.generate(prompts, options()), theirs)


# One compiled loop for the tests below: two prompts, four times each.
BATCH = ["to be or"] * 4 + ["not"] * 4
LENGTHS = 9, 4  # including the beginning-of-sequence token
DRAWN = options(top_p=1.0, temperature=0.7)


@pytest.fixture(scope="module")
def module():
    return make_model("qwen3")


@pytest.fixture(scope="module")
def shared_rollout(module):
    return JkvRollout(module, Alphabet(), block_size=4, chunk_size=8)


@pytest.fixture
def rollout(shared_rollout):
    """The engine, without other tests' requests and weights."""
    weights = nnx.state(make_model("qwen3"), nnx.Param)
    shared_rollout.update_params(weights, (nnx.Param,))
    shared_rollout._num_calls = 0
    return shared_rollout


def other_weights():
    return nnx.state(make_model("qwen3", seed=24), nnx.Param)


def test_equal_prompts_are_computed_once(rollout):
    output = rollout.generate(BATCH, options())
    assert int(rollout.statistics.prompt_tokens) == sum(LENGTHS)
    first = output.tokens[0].tolist()
    assert all(row.tolist() == first for row in output.tokens[:4])
    drawn = rollout.generate(BATCH, DRAWN)
    assert len({tuple(row) for row in drawn.tokens}) == len(BATCH)


def test_the_weights_are_the_trainers_own_arrays(rollout, module):
    assert rl_utils.is_sharing_weights(rollout.model(), module)
    embedding = module.embedder.input_embedding[...]

    def count_copies():
        alike = (a for a in jax.live_arrays() if a.shape == embedding.shape)
        return sum(bool(jnp.array_equal(array, embedding)) for array in alike)

    before = count_copies()
    another = JkvRollout(module, Alphabet())
    rollout.generate(BATCH, options())
    assert count_copies() == before and another.model() is module


def test_the_eos_token_is_not_part_of_the_completion(rollout, module):
    whole = rollout.generate(BATCH, options())
    end = int(whole.tokens[0][5])
    with_end = options(eos_tokens=[end])
    ours = rollout.generate(BATCH, with_end)
    assert len(ours.tokens[0]) <= 5 and end not in ours.tokens[0]
    assert_same(ours, make_vanilla(module).generate(BATCH, with_end))


def test_logprobs_at_a_temperature_equal_the_trainers(rollout, module):
    output = rollout.generate(BATCH, DRAWN)
    completions = padded(output.tokens)
    expected = common.compute_per_token_logps(
        *nnx.split(module),
        prompt_tokens=jnp.array(output.left_padded_prompt_tokens),
        completion_tokens=jnp.array(completions),
        pad_id=PAD,
        eos_id=EOS,
        temperature=DRAWN.temperature,
    )
    for row, tokens, logps in zip(
        output.logprobs, output.tokens, expected, strict=True
    ):
        seen = len(tokens) if PAD not in tokens else tokens.tolist().index(PAD)
        np.testing.assert_allclose(row[:seen], logps[:seen], atol=TOLERANCE)
    # The rollout's own are at temperature 1, like vanilla's.
    ours = rollout.get_per_token_logps(
        jnp.array(output.left_padded_prompt_tokens), jnp.array(completions)
    )
    assert np.abs(ours - expected).max() > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_logps_equal_vanilla_and_a_prompt_is_computed_once(name):
    """Completions of other lengths, mixed groups, and one ended by its padding."""
    module = make_model(name)
    rollout = JkvRollout(module, Alphabet(), block_size=4)
    rng = np.random.default_rng(3)
    draw = [rng.integers(3, 20, n).tolist() for n in (9, 9, 9, 6, 6, 6)]
    long, short = draw[0], [PAD] * 3 + draw[3]
    if name == "gemma2":  # Tunix measures its window from the padding on
        short = draw[1]
    prompts = np.array([long, short, short, long, long, short], np.int32)
    completions = rng.integers(3, 20, (6, 7)).astype(np.int32)
    for row, length in zip(completions, (7, 4, 1, 6, 7, 3), strict=True):
        row[length:] = PAD
    rows = []

    def count(params, tokens, cache, batch, *, model=rollout._model):
        rows.append(tokens.shape[0])
        return model(params, tokens, cache, batch)

    rollout._model = count
    ours = np.asarray(rollout.get_per_token_logps(prompts, completions))
    assert set(rows) == {2 * 9 + 6 * (7 - 1)}
    theirs = np.asarray(
        make_vanilla(module).get_per_token_logps(
            jnp.array(prompts), jnp.array(completions)
        )
    )
    is_padding = completions == PAD
    is_scored = np.cumsum(is_padding, axis=1) <= 1
    assert theirs[is_scored].std() > 0.1
    np.testing.assert_allclose(ours[is_scored], theirs[is_scored], atol=TOLERANCE)
    assert (ours[~is_scored] == 0).all()


def test_logps_after_a_generated_pad_token_equal_the_sampled_ones(rollout, module):
    """A padding token within a sequence counts; outside it does not."""
    rng = np.random.default_rng(5)
    prompts = rng.integers(3, 20, (3, 6)).astype(np.int32)
    prompts[0, [1, 2]] = prompts[1, 5] = PAD
    completions = rng.integers(3, 20, (3, 7)).astype(np.int32)
    completions[0, [0, 2]] = completions[1, 3] = PAD
    completions[1, 5:] = completions[2, :] = PAD
    ours = np.asarray(rollout.get_per_token_logps(prompts, completions))
    unused = 21  # marks no token as padding
    expected = common.compute_per_token_logps(
        *nnx.split(module),
        prompt_tokens=jnp.array(prompts),
        completion_tokens=jnp.array(completions),
        pad_id=unused,
        eos_id=EOS,
    )
    for row, (has, want, ended) in enumerate(
        zip(ours, expected, (7, 6, 1), strict=True)
    ):
        np.testing.assert_allclose(
            has[:ended], want[:ended], atol=TOLERANCE, err_msg=str(row)
        )
        assert (has[:ended] < 0).all() and (has[ended:] == 0).all()
    wider = np.pad(prompts, ((0, 0), (2, 0)), constant_values=PAD)
    traced = np.asarray(rollout.score(module, wider, completions))
    is_scored = [[True] * 7, [True] * 5 + [False] * 2, [False] * 7]
    np.testing.assert_allclose(traced, np.where(is_scored, expected, 0), atol=TOLERANCE)


def test_logps_of_a_prompt_without_tokens_are_refused(rollout):
    with pytest.raises(ValueError, match=r"prompts\[1\] has no tokens"):
        rollout.get_per_token_logps(np.array([[PAD, 5], [PAD, PAD]]), np.ones((2, 3)))


def test_top_k_and_top_p_keep_the_likely_tokens(rollout):
    greedy = rollout.generate(BATCH, options())
    for fields in (dict(top_k=1, top_p=1.0), dict(top_p=1e-6)):
        output = rollout.generate(BATCH, options(temperature=0.7, **fields))
        assert output.text == greedy.text


def test_a_run_is_reproducible_from_its_seed(rollout):
    def run(seed):
        rollout._num_calls = 0
        drawn = options(top_p=1.0, seed=seed)
        outputs = [rollout.generate(BATCH, drawn) for _ in range(2)]
        return [[row.tolist() for row in output.tokens] for output in outputs]

    once = run(3)
    assert run(jax.random.PRNGKey(3)) == once
    assert once[0] != once[1], "two calls of a run draw alike"
    assert run(4)[0] != once[0]


def test_prompts_are_cached_until_the_weights_change(rollout, module):
    rollout.generate(BATCH, options())
    rollout.generate(BATCH, options())
    assert int(rollout.statistics.cached_tokens) > 0

    # As an optimizer does, which shares the weights without a call.
    nnx.update(module, other_weights())
    output = rollout.generate(BATCH, options())
    assert int(rollout.statistics.cached_tokens) == 0
    assert_same(output, make_vanilla(module).generate(BATCH, options()))


def test_update_params_copies_nothing_to_the_host_and_clears_prefixes(rollout):
    rollout.generate(BATCH, options())
    weights = other_weights()
    with (
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        rollout.update_params(weights, (nnx.Param,))
    rollout.generate(BATCH, options())
    assert int(rollout.statistics.cached_tokens) == 0
    with pytest.raises(ValueError, match="must match the model's weights"):
        rollout.update_params({"other": jnp.zeros(3)})


def test_nan_logits_are_an_error(rollout, module):
    norm = module.final_norm.w
    norm[...] = norm[...].at[0].set(jnp.nan)
    with pytest.raises(FloatingPointError, match=r"logits of prompts\[0\] are NaN"):
        rollout.generate(BATCH, options())


@pytest.mark.parametrize(
    "prompts, message",
    [([], "pass at least one"), (["a", ""], r"prompts\[1\] has no tokens")],
)
def test_prompts_that_cannot_be_continued_are_refused(
    rollout, prompts, message, monkeypatch
):
    monkeypatch.setattr(rollout._tokenizer, "bos_id", lambda: 0)
    with pytest.raises(ValueError, match=message):
        rollout.generate(prompts, options())


def test_an_unknown_model_is_refused_by_name():
    with pytest.raises(ValueError, match=r"one of Qwen3, .* got .*\.Linear"):
        JkvRollout(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), Alphabet())


def test_a_copy_in_another_dtype_follows_the_trainers_weights():
    theirs = make_model("qwen3")
    ours = put_module(theirs, None, jnp.bfloat16)
    assert ours is not theirs and put_module(theirs, None, jnp.float32) is theirs
    new = other_weights()
    update(ours, new, (nnx.Param,))
    for our_leaf, leaf in zip(
        jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(new), strict=True
    ):
        assert our_leaf.dtype == jnp.bfloat16
        np.testing.assert_array_equal(our_leaf, leaf.astype(jnp.bfloat16))


def test_adapters_are_applied():
    """LoRA as in Tunix's trainers: weights beside weights, applied by the layers."""
    base = make_model("qwen3")
    provider = qwix.LoraProvider(module_path=".*(_proj)", rank=2, alpha=2.0)
    module = qwix.apply_lora_to_model(
        base, provider, rngs=nnx.Rngs(1), **base.get_model_input()
    )
    shake(module, seed=1, size=0.1)
    theirs = make_vanilla(module).generate(PROMPTS, options())
    assert all(PAD not in row for row in theirs.tokens)
    sizes = dict(block_size=4, num_blocks=9, max_running=2, chunk_size=2)
    rollout = JkvRollout(module, Alphabet(), **sizes, prefix_caching=False)
    assert_same(rollout.generate(PROMPTS, options()), theirs)
    plain = make_vanilla(base).generate(PROMPTS, options())
    assert plain.text != theirs.text


@pytest.mark.filterwarnings("ignore:.with mesh.*:DeprecationWarning")
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_weights_may_be_resharded_over_a_mesh():
    """Rollouts on other devices than the trainer need a copy."""
    theirs = make_model("qwen3")
    vanilla = make_vanilla(theirs)
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("fsdp", "tp"))
    sizes = dict(chunk_size=2, prefix_caching=False)
    rollout = JkvRollout(theirs, Alphabet(), mesh, options(), **sizes)
    assert not rl_utils.is_sharing_weights(theirs, rollout.model())
    kernel = rollout.model().layers[0].mlp.up_proj.kernel[...]
    assert kernel.sharding.shard_shape(kernel.shape) == (16, 16)
    with mesh:
        expected = vanilla.generate(SHORTER, options())
        assert_same(rollout.generate(SHORTER, options()), expected)
        # The trainer continues on its own device, and passes its weights.
        nnx.update(theirs, other_weights())
        rollout.update_params(nnx.state(theirs, nnx.Param), (nnx.Param,))
        updated = rollout.model().layers[0].mlp.up_proj.kernel[...]
        assert updated.sharding == kernel.sharding
        changed = rollout.generate(SHORTER, options())
    assert changed.text != expected.text
    assert_same(changed, make_vanilla(theirs).generate(SHORTER, options()))


def test_the_trainer_can_construct_the_engine():
    assert issubclass(JkvRollout, base_rollout.BaseRollout)
    made = JkvRollout(
        rollout_actor=make_model("qwen3"),
        tokenizer=Alphabet(),
        mesh=None,
        rollout_config=options(),
    )
    assert (made.pad_id(), made.eos_id()) == (PAD, EOS)
