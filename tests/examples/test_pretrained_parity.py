"""Checkpoints of every architecture give the logits of transformers.

If transformers is installed, checkpoints are written and logits computed, and the
committed ones must equal them; otherwise the committed ones are read.
JKV_REQUIRE_PARITY makes it mandatory. Covers most of a real model at once: packing,
positions, windows, block tables, experts, all layers.
"""

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
from support.checkpoints import checkpoint_fixtures as fixtures
from support.jax_versions import ALL_CASES, dealt, few, further, with_further
from support.small_caches import with_storage_filled

import jkv

# Absolute, for float32 logits of 5 to 15. The largest observed difference was 2.4e-5,
# the smallest mistake below differs by 0.9.
TOLERANCE = 2e-4

NEEDED = ("transformers", "torch", "accelerate")
HAS_TRANSFORMERS = all(map(importlib.util.find_spec, NEEDED))
if os.environ.get("JKV_REQUIRE_PARITY") and not HAS_TRANSFORMERS:
    raise ImportError(f"JKV_REQUIRE_PARITY is set, but one of {NEEDED} is missing")
NAMES = (*fixtures.CASES, "pydoc")


# `make test` runs one checkpoint per kind of layer.
IN_MAKE_TEST = {
    *("llama2", "llama_dynamic", "qwen2", "phi3", "gemma2", "gemma3", "gemma4"),
    *("qwen3_moe", "gpt_oss", "deepseek_v3", "smollm3", "qwen3_next", "mamba2"),
    *("falcon_h1", "lfm2_moe", "zaya", "pydoc"),
}
CHECKPOINTS = few(
    with_further(NAMES, *(name for name in NAMES if name not in IN_MAKE_TEST)),
    *("gemma3", "lfm2_moe"),
)

# Tokens of each prompt of the tiny checkpoints by call. If frequencies depend on the
# length, a prompt beyond the original context must be computed in one call, as by
# transformers.
UNEVEN_CHUNKS = ((1, 3, 0), (0, 9, 5), (0, 1, 1), (0, 13, 0), (0, 0, 5))
STRETCHED_CHUNKS = ((1, 26, 0), (0, 0, 5), (0, 0, 6))
STRETCHED = ("llama_dynamic", "phi3")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint with the results of transformers."""

    name: str
    model: Any
    params: Any
    expected: dict[str, np.ndarray]

    @property
    def prompts(self) -> list[np.ndarray]:
        return self._split(self.expected["prompts"])

    @property
    def prefill(self) -> list[np.ndarray]:
        return self._split(self.expected["prefill"])

    def _split(self, rows: np.ndarray) -> list[np.ndarray]:
        return np.split(rows, np.cumsum(self.expected["prompt_lengths"])[:-1])


def load_committed(name: str) -> Checkpoint:
    folder = fixtures.checkpoint_folder(name)
    expected = dict(np.load(fixtures.FIXTURES / name / "expected.npz"))
    # Against transformers, layers run one by one, the default.
    loaded = pretrained.load(folder, scan_layers=True)
    return Checkpoint(name, *loaded, expected)


def load_live(name: str, folder: Path) -> Checkpoint:
    committed = None
    if name not in STRETCHED:
        committed = np.load(fixtures.FIXTURES / name / "expected.npz")["generated"]
    if name == "pydoc":
        folder, kept = fixtures.checkpoint_folder(name), fixtures.COMMITTED_STEPS
    else:
        fixtures.write_checkpoint(name, folder)
        kept = range(fixtures.NUM_STEPS)
    expected = fixtures.expected(name, folder, kept, committed)
    return Checkpoint(name, *pretrained.load(folder), expected)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request, tmp_path_factory):
    if HAS_TRANSFORMERS:
        return load_live(request.param, tmp_path_factory.mktemp("checkpoint"))
    return load_committed(request.param)


# A sixth of the mistakes; all of them first for four checkpoints with norms, windows,
# experts and states.
FIRST = {"llama2", "gemma2", "qwen3_moe", "qwen3_5_moe"}
CAUGHT = [
    name
    for number, name in enumerate(dealt(fixtures.CASES))
    if name in FIRST or number % 3 == 0
]
TINY = with_further(CAUGHT, *({*CAUGHT} - FIRST))


@pytest.fixture(scope="module", params=TINY)
def tiny_checkpoint(request):
    return load_committed(request.param)


# One program per checkpoint: every step has this many rows, and all logits.
CAPACITY = 40

forward = jax.jit(
    lambda model, *args: model(*args, all_rows=True),
    static_argnums=0,
    donate_argnums=3,
)
append = jax.jit(jkv.append, static_argnames="capacity")
commit = jax.jit(jkv.commit)


def open_sequences(model, num_sequences):
    """Return a cache of small blocks, its storage full of NaN, and open sequences.

    The newest token can be rolled back, also in recurrent layers.
    """
    config = model.cache_config(
        96,
        max_sequences=num_sequences + 1,
        num_blocks=72,
        block_size=4,
        dtype=jnp.float32,
        max_pending=1,
    )
    cache = with_storage_filled(jkv.init(config), np.nan)
    cache, opened = jkv.allocate(cache, np.zeros(num_sequences, np.int32))
    jkv.raise_for_status(opened.status)
    return cache, np.asarray(opened.seq_ids)


def feed(model, params, cache, seq_ids, pieces: Sequence[np.ndarray]):
    """Append some tokens to each sequence, in one call with two rows of padding.

    Returns the cache and, per sequence, its logits, [len(piece), V].
    """
    # The padding request is between the others, so that every later row is displaced.
    ids = np.insert(seq_ids, 1, jkv.NO_SEQUENCE)
    padded = [pieces[0], np.full(2, -1, np.int32), *pieces[1:]]
    counts = np.asarray([len(piece) for piece in padded], np.int32)
    tokens = np.full(CAPACITY, -1, np.int32)
    tokens[: counts.sum()] = np.concatenate(padded)
    cache, batch = append(cache, ids.astype(np.int32), counts, capacity=CAPACITY)
    jkv.raise_for_status(batch.status)
    logits, cache = forward(model, params, tokens, cache, batch)
    logits = np.split(np.asarray(logits)[: counts.sum()], np.cumsum(counts)[:-1])
    return commit(cache, batch), [logits[0], *logits[2:]]


def prefill(model, params, prompts):
    """Compute whole prompts at once; return cache, sequences and logits."""
    cache, seq_ids = open_sequences(model, len(prompts))
    cache, logits = feed(model, params, cache, seq_ids, prompts)
    return cache, seq_ids, logits


def decode(model, params, cache, seq_ids, tokens, num_steps):
    """Yield the logits [B, V] of greedy steps, the first of which computes `tokens`."""
    for _ in range(num_steps):
        cache, logits = feed(model, params, cache, seq_ids, list(tokens[:, None]))
        logits = np.concatenate(logits)
        yield logits
        tokens = logits.argmax(-1)
    jkv.check(cache)


def assert_close(logits, expected):
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


def test_prompts_of_unequal_length_in_one_call(checkpoint):
    _, _, logits = prefill(checkpoint.model, checkpoint.params, checkpoint.prompts)
    for got, expected in zip(logits, checkpoint.prefill, strict=True):
        assert_close(got, expected)


def test_prompts_in_uneven_chunks(checkpoint):
    prompts = checkpoint.prompts
    chunks = STRETCHED_CHUNKS if checkpoint.name in STRETCHED else UNEVEN_CHUNKS
    if checkpoint.name == "pydoc":
        chunks = ((1, 2), (2, 0), (len(prompts[0]) - 3, len(prompts[1]) - 2))
    assert np.sum(chunks, axis=0).tolist() == [len(prompt) for prompt in prompts]

    cache, seq_ids = open_sequences(checkpoint.model, len(prompts))
    done = np.zeros(len(prompts), int)
    for counts in chunks:
        ends = done + counts
        pieces = [p[a:b] for p, a, b in zip(prompts, done, ends, strict=True)]
        cache, logits = feed(
            checkpoint.model, checkpoint.params, cache, seq_ids, pieces
        )
        for got, whole, a, b in zip(
            logits, checkpoint.prefill, done, ends, strict=True
        ):
            assert_close(got, whole[a:b])
        done = ends
    jkv.check(cache)


def test_fifty_decode_steps(checkpoint):
    expected = checkpoint.expected
    # Rounding cannot change the chosen tokens.
    assert expected["margin"] > 10 * TOLERANCE

    cache, seq_ids, logits = prefill(
        checkpoint.model, checkpoint.params, checkpoint.prompts
    )
    first = np.asarray([rows[-1].argmax() for rows in logits])
    steps = list(
        decode(
            checkpoint.model,
            checkpoint.params,
            cache,
            seq_ids,
            first,
            fixtures.NUM_STEPS,
        )
    )
    chosen = np.stack([first, *(step.argmax(-1) for step in steps)], axis=1)
    np.testing.assert_array_equal(chosen, expected["generated"])
    detailed = np.stack(steps)[expected["steps"], fixtures.DETAILED]
    assert_close(detailed, expected["decode"])


@pytest.mark.one_end
@pytest.mark.parametrize(
    "name, groups", [("smollm3", (0, 1, 0)), *further([("gemma3", (1, 1, 0))])]
)
def test_layers_grouped_by_window(name, groups):
    """Each kind has its pool, in a scan over periods of two layers and without."""
    checkpoint = load_committed(name)
    fields = {**checkpoint.model.cache_fields}
    del fields["num_layers"]
    config = jkv.GroupedConfig.for_context_length(
        96,
        max_sequences=4,
        layer_windows=checkpoint.model.config.windows,
        step_tokens=CAPACITY,
        block_size=4,
        dtype=jnp.float32,
        **fields,
    )
    assert config.layer_groups == groups
    cache, opened = jkv.allocate(jkv.init(config), np.zeros(3, np.int32))
    arguments = checkpoint.model, checkpoint.params
    cache, logits = feed(*arguments, cache, opened.seq_ids, checkpoint.prompts)
    for got, expected in zip(logits, checkpoint.prefill, strict=True):
        assert_close(got, expected)
    first = np.asarray([rows[-1].argmax() for rows in logits])
    steps = list(decode(*arguments, cache, opened.seq_ids, first, fixtures.NUM_STEPS))
    chosen = np.stack([first, *(step.argmax(-1) for step in steps)], axis=1)
    np.testing.assert_array_equal(chosen, checkpoint.expected["generated"])


@pytest.mark.one_end
def test_a_run_that_begins_within_a_period_has_its_own_windows():
    """The first of three layers is a run by itself: nothing is left to scan."""
    checkpoint = load_committed("cohere2_moe")
    model, fields = checkpoint.model, {**checkpoint.model.cache_fields}
    del fields["num_layers"]
    config = jkv.GroupedConfig.for_context_length(
        32, max_sequences=1, layer_windows=(None, 8, None), step_tokens=4, **fields
    )
    cache, opened = jkv.allocate(jkv.init(config), 0)
    cache, batch = jkv.append(cache, opened.seq_ids, 4, capacity=4)
    tokens = np.zeros(4, np.int32)
    logits, _ = jax.eval_shape(model, checkpoint.params, tokens, cache, batch)
    assert logits.shape == (1, fixtures.VOCAB_SIZE)


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="nothing to compare with")
def test_committed_checkpoints_equal_transformers(checkpoint):
    committed, kept = load_committed(checkpoint.name), checkpoint.expected["steps"]
    config = dataclasses.replace(checkpoint.model.config, scan_layers=True)
    assert committed.model.config == config
    stacked = stack_layers(config, checkpoint.params)
    jax.tree.map(np.testing.assert_array_equal, committed.params, stacked)
    shared = np.isin(kept, committed.expected["steps"])
    assert shared.sum() == len(committed.expected["steps"])
    assert_close(checkpoint.expected["decode"][shared], committed.expected["decode"])
    for name in ("prompts", "prompt_lengths", "generated"):
        np.testing.assert_array_equal(
            checkpoint.expected[name], committed.expected[name]
        )
    assert_close(checkpoint.expected["prefill"], committed.expected["prefill"])


def stack_layers(config, params):
    """Stack the parameters of separate layers for scans."""
    layers = [
        jax.tree.map(lambda *arrays: np.concatenate(arrays), *alike)
        for run in config.runs
        for alike in [params["layers"][run.start : run.stop]]
    ]
    return params | {"layers": layers}


@dataclasses.dataclass(frozen=True)
class Shifted:
    """A model whose positions are one too low from `start` on."""

    model: Any
    start: int

    def cache_config(self, *given, **sizes):
        return self.model.cache_config(*given, **sizes)

    def __call__(self, params, tokens, cache, batch, *, all_rows=False):
        late = (batch.positions >= self.start).astype(jnp.int32)
        batch = dataclasses.replace(batch, positions=batch.positions - late)
        return self.model(params, tokens, cache, batch, all_rows=all_rows)


def wrong_models(checkpoint):
    """Yield porting mistakes: a name, and the wrong model and parameters."""
    yield from (
        (what, checkpoint.model, params) for what, params in wrong_params(checkpoint)
    )
    config = checkpoint.model.config
    if checkpoint.name == "llama2":
        shifted = Shifted(checkpoint.model, 4)
        yield "positions shifted by one from the fifth on", shifted, checkpoint.params
    mistakes = list(wrong_settings(config))
    if mistakes and not ALL_CASES:
        # Each of these compiles a model, so every checkpoint tests a different one.
        turn = list(fixtures.CASES).index(checkpoint.name) // 2
        mistakes = [mistakes[turn % len(mistakes)]]
    for what, changes in mistakes:
        model = pretrained.Decoder(dataclasses.replace(config, **changes))
        yield what, model, checkpoint.params


def wrong_params(checkpoint):
    """Yield wrong parameters, which need no new compilation."""
    params, config = checkpoint.params, checkpoint.model.config

    def changed(change, *names):
        layers = [
            {n: change(w) if n in names else w for n, w in run.items()}
            for run in params["layers"]
        ]
        outside = {n: change(w) for n, w in params.items() if n in names}
        return params | outside | {"layers": layers}

    def filled(value):
        return lambda weights: jnp.full_like(weights, value)

    def scaled(factor, offset=0.0):
        return lambda weights: (weights + offset) * factor - offset

    def rolled(count):
        return lambda weights: jnp.roll(weights, count, axis=1)

    present = {name for run in params["layers"] for name in run}
    for name in sorted(present):
        if name.endswith("_bias"):
            yield f"no {name}", changed(filled(0.0), name)
        elif name.endswith("norm"):
            yield f"no {name}", changed(filled(1 - config.norm_offset), name)
        elif name.endswith(("kept_scale", "mixed_scale", "convolved_scale")):
            yield f"no {name}", changed(filled(1.0), name)
    if "router_state_scale" in present:
        yield "no router of the layer before", changed(filled(0), "router_state_scale")
    for name in ("final_norm_bias", "head_bias", "input_bias"):
        if name in params:
            yield f"no {name}", changed(filled(0.0), name)
    if config.num_kv_heads > 1 and "key" in present:
        yield "key heads of other groups", changed(rolled(config.head_dim), "key")
    if config.has_sinks:
        yield "no sinks", changed(filled(-1e9), "sinks")
    for what, factor, *names in (
        ("embeddings", config.embedding_scale, "embedding"),
        ("residuals", config.residual_scale, "output", "down"),
        ("logits", config.logit_scale, "final_norm" if config.tied else "head"),
    ):
        if factor != 1:
            yield f"{what} as they are", changed(scaled(1 / factor), *names)
    if config.scale and not config.latent and config.qk_norm != "unit":
        # Longer queries, or query norms, increase the scores.
        factor = config.head_dim**-0.5 / config.scale
        offset = config.norm_offset if config.qk_norm else 0.0
        name = "query_norm" if config.qk_norm else "query"
        yield "the usual scale", changed(scaled(factor, offset), name)
    of_states = ("delta_offset", "delta_rate")
    of_states += ("mamba_offset", "mamba_rate", "mamba_skip")
    for name in of_states:
        if name in present:
            yield f"no {name}", changed(filled(0.0), name)
    taps = [name for name in present if name.endswith("taps")]
    if taps:
        yield (
            "convolutions backwards",
            changed(lambda weights: weights[..., ::-1], *taps),
        )
    if config.output_gate:
        yield "no gate of queries", changed(filled(0.0), "query_gate")
    if experts := config.experts:
        yield "other experts", changed(rolled(1), "expert_up")
        if experts.scale != 1:
            yield (
                "experts as they are",
                changed(scaled(1 / experts.scale), "expert_down"),
            )
        if experts.shared_scale != 1:
            factor = 1 / experts.shared_scale
            yield (
                "the shared expert's whole output",
                changed(scaled(factor), "shared_down"),
            )
        if experts.shared_inner:
            yield "no shared expert", changed(filled(0.0), "shared_down")
        if experts.has_shared_gate:
            yield "the shared expert as it is", changed(filled(0.0), "shared_weight")


def wrong_settings(config):
    """Yield wrong settings, which need a model each, if a checkpoint detects them."""

    def every_rope(**changes):
        ropes = (rope and dataclasses.replace(rope, **changes) for rope in config.ropes)
        return dict(ropes=tuple(ropes))

    rope = next(filter(None, config.ropes), pretrained.Rope(dim=0))
    if rope.scaling != "default":
        yield "no scaling", every_rope(scaling="default", magnitude=1.0)
    if rope.magnitude != 1:
        yield "turned vectors as long as before", every_rope(magnitude=1.0)
    if latent := config.latent:
        usual = (latent.plain_dim + latent.turned_dim) ** -0.5
        if not np.isclose(config.scale, usual):
            yield "the usual scale", dict(scale=usual)
    if rope.is_interleaved:
        yield "pairs half apart", every_rope(is_interleaved=False)
    if config.has_centred_norms:
        yield "norms around 0", dict(has_centred_norms=False)
    if config.query_growth:
        yield "queries as long as at the start", dict(query_growth=None)
    if len(set(config.ropes)) > 1:
        yield "layers turn alike", dict(ropes=(rope,) * config.num_layers)
    if any(config.windows):
        windows = tuple(window and window + 1 for window in config.windows)
        yield "windows one token wider", dict(windows=windows)
    if len(set(config.windows)) > 1:
        widest = max(window or 0 for window in config.windows)
        yield "windows in all layers", dict(windows=(widest,) * config.num_layers)
    for name in ("soft_cap", "logit_cap", "swiglu_limits"):
        if getattr(config, name):
            yield f"no {name}", {name: None}
    if config.activation != "silu":
        yield "another activation", dict(activation="silu")
    if delta := config.delta_rule:
        if delta.least_decay is not None:
            other = dataclasses.replace(delta, least_decay=None)
            yield "decays without a bound", dict(delta_rule=other)
        other = dataclasses.replace(delta, strength=3.0 - delta.strength)
        yield "corrections of another strength", dict(delta_rule=other)
        gate = "silu" if delta.gate == "sigmoid" else "sigmoid"
        other = dataclasses.replace(delta, gate=gate)
        yield "another gate of states", dict(delta_rule=other)
    if space := config.state_space:
        for what, wrong in wrong_state_spaces(space):
            yield what, dict(state_space=dataclasses.replace(space, **wrong))
    for name in ("attention_scales", "mlp_scales"):
        if set(getattr(config, name)) != {1.0}:
            yield f"no {name}", {name: (1.0, 1.0)}
    if gate := config.output_gate:
        function = "softplus" if gate.function == "sigmoid" else "sigmoid"
        other = dataclasses.replace(gate, function=function)
        yield "another gate of outputs", dict(output_gate=other)
    if config.qk_norm == "unit":
        yield "the usual scale", dict(scale=None)
    for name in ("post_norm_epsilon", "final_norm_offset"):
        if getattr(config, name) is not None:
            yield f"no {name}", {name: None}
    if config.has_embedding_norm:
        yield "embeddings as they are", dict(has_embedding_norm=False)
    if config.norm_offset:
        yield "weights of norms as they are", dict(norm_offset=0.0)
    if config.has_centred_norms:
        yield "norms around any mean", dict(has_centred_norms=False)
    if config.qk_norm == "turned":
        yield "norms before turning", dict(qk_norm="head")
    if experts := config.experts:
        if experts.per_token > 1:
            fewer = dataclasses.replace(experts, per_token=experts.per_token - 1)
            yield "fewer experts", dict(experts=fewer)
        other = dict(is_normalised=not experts.is_normalised)
        if experts.jitter is not None:
            other = dict(jitter=experts.jitter / 10)
        other = dataclasses.replace(experts, **other)
        # Their own norms would cancel the factor, and one has a router of its own.
        if not experts.has_own_norms and experts.router_inner is None:
            yield "other weights of experts", dict(experts=other)
        if experts.score_cap is not None:
            uncapped = dataclasses.replace(experts, score_cap=None)
            yield "scores of experts without a cap", dict(experts=uncapped)
        if experts.groups > 1:
            one_group = dict(groups=1, groups_per_token=1)
            yield "no groups", dict(experts=dataclasses.replace(experts, **one_group))


def wrong_state_spaces(space):
    """Yield wrong fields of a Mamba 2 layer that a checkpoint detects."""
    yield "another order of gate and norm", dict(norm=None)
    if space.step_limits != (0.0, np.inf):
        yield "steps without limits", dict(step_limits=(0.0, np.inf))
    if len(set(space.scales)) > 1:
        yield "other scales of states", dict(scales=space.scales[::-1])
    for name in ("input_scale", "output_scale"):
        if getattr(space, name) != 1:
            yield f"no {name} of states", {name: 1.0}


@pytest.mark.one_end
def test_tolerance_catches_wrong_prefill(tiny_checkpoint):
    for mistake, model, params in wrong_models(tiny_checkpoint):
        _, _, logits = prefill(model, params, tiny_checkpoint.prompts)
        error = np.abs(logits[1] - tiny_checkpoint.prefill[1]).max()
        assert error > 100 * TOLERANCE, f"{mistake}: off by {error} only, or not finite"


@pytest.mark.one_end
def test_tolerance_catches_other_sequences_and_zeros(tiny_checkpoint):
    _, second, third = tiny_checkpoint.prefill
    # In every row, so that no misplaced or empty row can pass.
    assert np.abs(second[: len(third)] - third).max(axis=-1).min() > 100 * TOLERANCE
    assert np.abs(second[1:] - second[:-1]).max(axis=-1).min() > 100 * TOLERANCE
    assert np.abs(second).max(axis=-1).min() > 100 * TOLERANCE


@pytest.mark.one_end
def test_tolerance_catches_a_lost_token_in_decoding(tiny_checkpoint):
    params, prompts = tiny_checkpoint.params, tiny_checkpoint.prompts
    cache, seq_ids, logits = prefill(tiny_checkpoint.model, params, prompts)
    lengths = [len(prompt) - 1 for prompt in prompts]
    cache, status = jkv.truncate(cache, seq_ids, jnp.asarray(lengths, jnp.int32))
    jkv.raise_for_status(status)
    first = np.asarray([rows[-1].argmax() for rows in logits])
    (step,) = decode(tiny_checkpoint.model, params, cache, seq_ids, first, 1)
    error = np.abs(step[fixtures.DETAILED] - tiny_checkpoint.expected["decode"][0])
    assert error.max() > 100 * TOLERANCE
