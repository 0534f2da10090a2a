"""Published drafters give the draft tokens of their reference implementations.

`tests/fixtures/drafters` has tiny random targets and drafters, and the logits of each
draft token after one prompt: by transformers 5.24 for Gemma 4's assistants, MTP layers
(one token) and DFlash, and by speculators 0.9's layers for EAGLE-3 heads, in its own
form and in SGLang's. The prompt is longer than every window.
"""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import get_args, get_type_hints

import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
from pretrained.drafters import load_drafter
from pretrained.tensors import layer_tensors
from safetensors.numpy import load_file, save_file
from support.jax_versions import with_further

import jkv

FIXTURES = Path(__file__).parents[1] / "fixtures" / "drafters"
CHECKPOINTS = FIXTURES.parent / "checkpoints"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
EAGLE3 = "eagle3_qwen3", "eagle3_sglang"

# Absolute, for logits of about 4. The largest observed difference was 1.6e-5.
TOLERANCE = 2e-4


class GreedyStep:
    """A step of one sequence that records the logits of its draft tokens."""

    def __init__(self, newest, previous, num_tokens, batch, past):
        self.newest, self.previous, self.num_tokens = newest, previous, num_tokens
        self.batch, self.past = batch, past
        self.counts = jnp.array([num_tokens])
        self.logits = []

    def with_mask(self, mask, *, max_span=None):
        return jkv.with_mask(self.batch, mask, max_span=max_span)

    def choose(self, index, logits):
        assert index == len(self.logits)
        self.logits.append(np.asarray(logits[0]))
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def decode(self, compute, carry):
        tokens = self.newest
        for index in range(self.num_tokens):
            carry, logits = compute(carry, jnp.int32(index), tokens)
            tokens = self.choose(index, logits)
        return carry

    @property
    def drafted(self):
        tokens = [int(np.argmax(each)) for each in self.logits]
        return jnp.array([tokens]), jnp.array([self.num_tokens])


def draft(target, folder, expected, num_tokens):
    """Draft after a fixture's prompt; return the drafter, tokens and logits."""
    prompt = jnp.asarray(expected["prompt"])
    model, params = pretrained.load(target)
    config = model.cache_config(64, max_sequences=1, dtype="float32")
    drafter = load_drafter(
        folder, model, params, config, target=target, num_tokens=num_tokens
    )
    num_tokens = drafter.num_tokens
    cache = jkv.init(jkv.with_drafter(config, drafter))
    whole = cache.layer_groups
    num_own = sum(group.num_layers for group in drafter.groups)
    of_target = whole[: len(whole) - num_own]

    cache, opened = jkv.allocate(cache, [0])
    cache, batch = jkv.append(cache, opened.seq_ids, len(prompt), capacity=len(prompt))
    given = prompt, cache.with_layers(of_target), batch
    logits, cache, hidden = model(params, *given, aux_layers=drafter.aux_layers)
    nothing = jnp.zeros((1, hidden.shape[1]))
    cache = cache.with_layers(whole)
    cache = drafter.update(cache, batch, prompt, hidden, nothing)
    newest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    assert int(newest[0]) == int(expected["newest"])

    past, num_rows = jkv.peek(cache, opened.seq_ids), 1 + num_tokens
    cache, batch = jkv.append(cache, opened.seq_ids, num_rows, capacity=num_rows)
    step = GreedyStep(newest, hidden[-1:], num_tokens, batch, past)
    drafter.draft(cache, step)
    found = np.stack(step.logits)
    return drafter, np.argmax(found, axis=1).tolist(), found


@pytest.mark.one_end
@pytest.mark.parametrize("name", with_further(NAMES, *sorted({*NAMES} - {*EAGLE3})))
def test_draft_tokens_equal_the_reference(name):
    folder = FIXTURES / name
    expected = np.load(folder / "expected.npz")
    count, own = len(expected["tokens"]), folder / "drafter"
    own = own if own.is_dir() else None
    _, tokens, found = draft(folder / "target", own, expected, count)
    wanted = expected["logits"]
    is_drafted = np.isfinite(wanted)  # a draft vocabulary has fewer
    np.testing.assert_array_equal(np.isfinite(found), is_drafted)
    np.testing.assert_allclose(found[is_drafted], wanted[is_drafted], atol=TOLERANCE)
    assert tokens == expected["tokens"].tolist()
    # Logits of other draft steps differ clearly.
    if count > 1:
        moved = np.roll(wanted, 1, axis=0)
        assert np.abs(found[is_drafted] - moved[is_drafted]).max() > 0.1


@pytest.mark.further
@pytest.mark.one_end
@pytest.mark.parametrize("is_native", [True, False])
def test_dspark_adds_biases_to_dflash(tmp_path, is_native):
    """DSpark has the rows of a DFlash block, and biases by the previous token.

    In its native form the newest token's row drafts first, and the rows of mask tokens
    give the logits that transformers has for DFlash. speculators' form has a draft
    vocabulary and numbers layers by their inputs.
    """
    source, drawn = FIXTURES / "dflash", np.random.default_rng(7)
    expected = np.load(source / "expected.npz")
    config = json.loads((source / "drafter" / "config.json").read_text())
    tensors = load_file(source / "drafter" / "model.safetensors")
    head = load_file(source / "target" / "model.safetensors")["lm_head.weight"]
    before, after = (drawn.normal(0, 1.5, (128, 4)).astype(np.float32) for _ in "12")
    tokens, settings = np.arange(128), dict(markov_rank=4, markov_head_type="vanilla")
    settings |= dict(enable_confidence_head=True)
    if is_native:
        config |= dict(architectures=["DSparkDraftModel"], model_type="qwen3")
        layers = dict(target_layer_ids=config.pop("target_layer_ids"))
        config["dflash_config"] = settings | layers | dict(projector_type="dspark")
    else:
        tokens = np.sort(drawn.choice(128, 50, replace=False))
        own = ("block_size", "mask_token_id", "target_layer_ids")
        block_size, mask_token, layers = (config.pop(name) for name in own)
        config = dict(
            speculators_model_type="dspark",
            transformer_layer_config=config | dict(model_type="qwen3"),
            aux_hidden_state_layer_ids=[1 + layer for layer in layers],
            block_size=block_size,
            mask_token_id=mask_token,
            draft_vocab_size=50,
            sample_from_anchor=False,
            **settings,
        )
        tensors |= {"d2t": tokens - np.arange(50), "lm_head.weight": head[tokens]}
    tensors |= {
        "markov_head.markov_w1.weight": before,
        "markov_head.markov_w2.weight": after[tokens],
        "confidence_head.proj.weight": np.ones((1, 36), np.float32),
        "confidence_head.proj.bias": np.ones(1, np.float32),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")

    drafter, chosen, found = draft(source / "target", tmp_path, expected, None)
    wanted, others = expected["logits"], np.setdiff1d(np.arange(128), tokens)
    assert drafter.num_tokens == len(wanted) + is_native
    newest = int(expected["newest"])
    biases = before[[newest, *chosen[:-1]]] @ after.T
    if is_native:  # the first one has no reference
        found, biases = found[1:], biases[1:]
    assert np.isneginf(found[:, others]).all()
    np.testing.assert_allclose(
        found[:, tokens], (wanted + biases)[:, tokens], atol=TOLERANCE
    )
    assert np.abs(biases).max() > 1


@pytest.mark.one_end
def test_the_mtp_layer_of_qwen3_next_is_read(tmp_path):
    """Its tensors have their own names; the layer is an attention layer."""
    source, drawn = CHECKPOINTS / "qwen3_next", np.random.default_rng(5)
    tensors = load_file(source / "model.safetensors")
    # Attention of layer 1, and the experts of layer 2.
    past = {}
    for name, tensor in tensors.items():
        own = r"model\.layers\.(?:1\.(?!mlp)|2\.(?=mlp))(.*)"
        if match := re.fullmatch(own, name):
            noise = drawn.normal(0, 0.1, tensor.shape).astype(tensor.dtype)
            past[name] = match[1], noise
    shapes = dict.fromkeys(("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"), 32)
    mtp = {f"mtp.{n}.weight": drawn.normal(0, 0.1, k) for n, k in shapes.items()}
    mtp["mtp.fc.weight"] = drawn.normal(0, 0.1, (32, 64))
    mtp = {name: tensor.astype(np.float32) for name, tensor in mtp.items()}
    mtp |= {f"mtp.layers.0.{name}": tensor for name, tensor in past.values()}
    changed = tensors | {name: tensor for name, (_, tensor) in past.items()}
    for folder, kept in (("target", tensors | mtp), ("changed", changed)):
        (tmp_path / folder).mkdir()
        save_file(kept, tmp_path / folder / "model.safetensors")
        shutil.copy(source / "config.json", tmp_path / folder)

    model, params = pretrained.load(tmp_path / "target")
    config = model.cache_config(16, max_sequences=1, max_pending=2, dtype="float32")
    where = tmp_path / "target"
    drafter = load_drafter(None, model, params, config, target=where)
    _, wanted = pretrained.load(tmp_path / "changed")
    runs = list(zip(model.config.runs, wanted["layers"], strict=True))
    both = [weights for run, weights in runs if run.stop > 1]
    (found,) = drafter.params["layers"]
    assert "query" in found and any(name.startswith("expert_") for name in found)
    for name, weight in found.items():
        equal = [w for w in both if name in w and np.array_equal(w[name], weight)]
        assert equal, name
    names = dict(
        token_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        join="fc",
        after_norm="norm",
    )
    for name, stored in names.items():
        np.testing.assert_array_equal(drafter.params[name], mtp[f"mtp.{stored}.weight"])
    assert drafter.params["head"] is params["head"]


def test_drafters_of_other_targets_are_refused(tmp_path):
    folder = FIXTURES / "eagle3_sglang"
    model, params = pretrained.load(folder / "target")
    config = model.cache_config(64, max_sequences=1)
    with pytest.raises(ValueError, match="holds no MTP layer"):
        load_drafter(None, model, params, config, target=folder / "target")
    with pytest.raises(ValueError, match="pass the folder of a drafter"):
        load_drafter(None, model, params, config)
    other = json.loads((folder / "drafter" / "config.json").read_text())
    ids = dict(eagle_aux_hidden_state_layer_ids=[1, 2, 9])
    other["eagle_config"] = (other.get("eagle_config") or {}) | ids
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="inputs of layers .*, the target has"):
        load_drafter(tmp_path, model, params, config)


@pytest.fixture
def eagle3(tmp_path):
    """Function that loads an EAGLE-3 head after a change of its tensors and config."""
    source = FIXTURES / "eagle3_sglang"
    model, params = pretrained.load(source / "target")
    config = model.cache_config(64, max_sequences=1)
    raw = json.loads((source / "drafter" / "config.json").read_text())
    tensors = load_file(source / "drafter" / "model.safetensors")

    def load(left_out=(), settings=None, **changes):
        kept = {n: each for n, each in tensors.items() if n not in left_out}
        save_file(kept | changes, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(raw | (settings or {})))
        return load_drafter(tmp_path, model, params, config)

    return load


@pytest.mark.parametrize(
    ("left_out", "settings", "message"),
    [
        (["d2t"], None, "lacks the tensor 'd2t'"),
        (["lm_head.weight"], None, "lacks the tensor 'lm_head.weight'"),
        (["d2t", "lm_head.weight"], None, "lacks the tensor 'd2t'"),
        ([], {"draft_vocab_size": None}, "'d2t' has shape .96,., but it must be .128,"),
        (["lm_head.weight"], {"draft_vocab_size": 128}, "'d2t' has shape"),
    ],
)
def test_a_draft_vocabulary_has_ids_and_a_head(eagle3, left_out, settings, message):
    with pytest.raises(ValueError, match=message):
        eagle3(left_out, settings)


def test_a_head_without_a_draft_vocabulary(eagle3):
    """It has the target's output projection, or one of its own with all tokens."""
    names, settings = ["d2t", "lm_head.weight"], dict(draft_vocab_size=None)
    params = eagle3(names, settings).params
    assert params["head"].shape == (128, 32) and "draft_tokens" not in params
    own = np.ones((128, 32), np.float32)
    params = eagle3(["d2t"], settings, **{"lm_head.weight": own}).params
    np.testing.assert_array_equal(params["head"], own)


@pytest.mark.parametrize("first", [-1, 33])
def test_ids_outside_the_vocabulary_are_refused(eagle3, first):
    with pytest.raises(ValueError, match=f"'d2t' gives ids from {min(first, 0)} to"):
        eagle3(d2t=np.full(96, first) * (np.arange(96) == (0 if first < 0 else 95)))


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path):
    source = FIXTURES / "eagle3_sglang" / "target"
    model, params = pretrained.load(source)
    config = model.cache_config(64, max_sequences=1)
    assert load_drafter(source, model, params, config).num_tokens == 4
    raw = json.loads((source / "config.json").read_text()) | dict(vocab_size=64)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        ValueError, match="a vocabulary of 64 tokens .*, the target 128"
    ):
        load_drafter(tmp_path, model, params, config)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dflash", dict(mask_token_id=128), "mask_token_id 128 is outside"),
        ("dflash", dict(block_size=1), "'block_size' must be an int >= 2"),
        ("dflash", dict(target_layer_ids=[-1]), r"inputs of layers \(0,\)"),
        ("eagle3_sglang", dict(num_hidden_layers=2), "num_hidden_layers .* must be 1"),
        (
            "eagle3_sglang",
            dict(model_type="gemma2"),
            "layer of model_type 'gemma2' is not supported",
        ),
        (
            "eagle3_qwen3",
            dict(speculators_model_type="eagle", architectures=[]),
            "eagle3, dflash and dspark",
        ),
        (
            "gemma4_assistant_clusters",
            dict(num_centroids=3),
            "num_centroids 3 must divide the 128 tokens",
        ),
        (
            "gemma4_assistant_clusters",
            dict(centroid_intermediate_top_k=17),
            "centroid_intermediate_top_k 17 must not exceed",
        ),
    ],
)
def test_unsupported_drafter_settings_are_refused(tmp_path, name, settings, message):
    source = FIXTURES / name
    model, params = pretrained.load(source / "target")
    config = model.cache_config(64, max_sequences=1)
    shutil.copy(source / "drafter" / "model.safetensors", tmp_path)
    raw = json.loads((source / "drafter" / "config.json").read_text()) | settings
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path, model, params, config)


@pytest.mark.parametrize("name", ["laguna", "gemma4", "qwen3_next", "nemotron_h"])
def test_a_model_of_one_layer_has_its_sizes(name):
    """Its tensors have the shapes of the layer, and its cache one group."""
    config = pretrained.read_config(CHECKPOINTS / name)
    for run in config.runs:
        alone = config.take_layer(run.start)
        (own,) = alone.runs
        expected = layer_tensors(config, run)
        found = layer_tensors(alone, own)
        shares = config.key_layers and config.key_layers[run.start] != run.start
        assert shares or {n: x.stored for n, x in found.items()} == {
            n: x.stored for n, x in expected.items()
        }
        assert alone.windows == (config.windows[run.start],)
        assert alone.ropes == (config.ropes[run.start],)
        assert alone.has_spans(0) == config.has_spans(run.start)
        assert not alone.layer_heads and not alone.query_heads


def test_every_setting_of_layers_is_listed():
    """A field with an entry per layer is a tuple of any length."""
    hints = get_type_hints(pretrained.DecoderConfig)
    tuples = {name for name, hint in hints.items() if get_args(hint)[1:] == (...,)}
    fields = dataclasses.fields(pretrained.DecoderConfig)
    listed = {field.name for field in fields if field.metadata.get("is_per_layer")}
    assert listed == tuples - {"stop_tokens"} and len(listed) == 11


def test_the_mtp_layer_of_layers_with_other_query_heads(tmp_path):
    """It has the sizes of the last attention layer."""
    source = CHECKPOINTS / "laguna"
    model, params = pretrained.load(source)
    config, tensors = model.config, load_file(source / "model.safetensors")
    assert config.query_heads[-1] != config.num_heads
    last = f"model.layers.{config.num_layers - 1}."
    mtp = {
        name.replace(last, "mtp.layers.0."): tensor
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    wide = config.hidden_size
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        mtp[f"mtp.{name}.weight"] = np.ones(wide, np.float32)
    mtp["mtp.fc.weight"] = np.ones((wide, 2 * wide), np.float32)
    save_file(mtp, tmp_path / "model.safetensors")
    cache = model.cache_config(64, max_sequences=1)
    drafter = load_drafter(None, model, params, cache, target=tmp_path)
    (layer,) = drafter.params["layers"]
    np.testing.assert_array_equal(layer["query"][0], params["layers"][-1]["query"][0])
