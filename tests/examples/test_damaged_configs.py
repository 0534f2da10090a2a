"""A config.json with a key that is missing or of another type is read or refused.

An error is a ValueError that names the key; no value of a wrong type is kept.
"""

import contextlib
import dataclasses
import json

import pretrained
import pretrained.drafters
import pytest
from denoising.checkpoint import read_text_settings
from pretrained import hrm_text
from support.checkpoints.damaged_configs import assert_explained, list_damaged
from support.paths import FIXTURES

from jkv.config import huggingface

pytestmark = pytest.mark.one_end

MODELS = sorted(path.parent.name for path in FIXTURES.glob("checkpoints/*/config.json"))
DRAFTERS = sorted(path.parts[-2] for path in FIXTURES.glob("drafters/*/drafter"))


@pytest.mark.parametrize("name", MODELS)
def test_damaged_models(name):
    raw = json.loads((FIXTURES / "checkpoints" / name / "config.json").read_text())
    for key, damage, damaged in list_damaged(raw):
        try:
            config = pretrained.parse_config(damaged)
        except ValueError as error:
            assert_explained(error, key, damage)
        else:
            kept = repr(dataclasses.replace(config, dtype_name=""))
            assert "'?'" not in kept and "[]" not in kept, (key, damage)


@pytest.mark.parametrize("name", MODELS)
def test_the_cache_of_damaged_models(name, monkeypatch):
    """The reader of the cache's sizes raises ValueError, or keeps no wrong type."""
    path = FIXTURES / "checkpoints" / name / "config.json"
    raw = json.loads(path.read_text())
    for key, damage, damaged in list_damaged(raw, ("?", -1, [1])):
        monkeypatch.setattr(huggingface, "_read_json", lambda _, given=damaged: given)
        with contextlib.suppress(ValueError):
            sizes = huggingface.read_sizes(path, {}, with_states=True)
            kept = repr(sizes._replace(notes=[]))
            assert "'?'" not in kept and "[1]" not in kept, (key, damage)


HRM_TEXT = dict(
    model_type="hrm_text",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers_per_stack=2,
    num_attention_heads=4,
    head_dim=8,
    H_cycles=2,
    L_cycles=2,
    embedding_scale=1.0,
    rope_parameters=dict(rope_theta=10_000.0),
    rms_norm_eps=1e-6,
)


def test_damaged_files_of_hrm_text(monkeypatch, tmp_path):
    for key, damage, damaged in list_damaged(HRM_TEXT):
        monkeypatch.setattr(hrm_text, "read_json", lambda _, raw=damaged: raw)
        with pytest.raises(ValueError) as error:
            hrm_text.load(tmp_path)
        assert key in str(error.value) or key == "model_type", (key, damage)
    monkeypatch.setattr(hrm_text, "read_json", lambda _: HRM_TEXT)
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        hrm_text.load(tmp_path)


def test_damaged_text_parts_of_a_denoiser():
    path = FIXTURES / "checkpoints" / "gemma4_moe" / "config.json"
    raw = dict(text_config=json.loads(path.read_text()), tie_word_embeddings=True)
    pretrained.parse_config(read_text_settings(raw))
    for key, damage, damaged in list_damaged(raw):
        try:
            pretrained.parse_config(read_text_settings(damaged))
        except ValueError as error:
            assert_explained(error, key, damage)


@pytest.fixture(scope="module")
def load_drafter():
    """Function that reads a fixture's drafter with another config.json."""
    targets = {}

    def load(name, raw):
        folder = FIXTURES / "drafters" / name
        if name not in targets:
            model, params = pretrained.load(folder / "target")
            config = model.cache_config(64, max_sequences=1, dtype="float32")
            targets[name] = model, params, config
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pretrained.drafters, "read_json", lambda _: raw)
            return pretrained.drafters.load_drafter(folder / "drafter", *targets[name])

    return load


def as_speculators(raw):
    """Return a DFlash drafter's config.json in the form of speculators."""
    own = ("block_size", "mask_token_id", "target_layer_ids")
    layers = {key: value for key, value in raw.items() if key not in own}
    return dict(
        speculators_model_type="dflash",
        transformer_layer_config=layers | dict(model_type="qwen3"),
        aux_hidden_state_layer_ids=[1 + layer for layer in raw["target_layer_ids"]],
        block_size=raw["block_size"],
        mask_token_id=raw["mask_token_id"],
        draft_vocab_size=128,
        sample_from_anchor=False,
    )


@pytest.mark.parametrize("name", [*DRAFTERS, "speculators"])
def test_damaged_drafters(name, load_drafter):
    folder = "dflash" if name == "speculators" else name
    path = FIXTURES / "drafters" / folder / "drafter" / "config.json"
    raw = json.loads(path.read_text())
    raw = as_speculators(raw) if name == "speculators" else raw
    load_drafter(folder, raw)
    unread = set()
    for key, damage, damaged in list_damaged(raw):
        # A key that may be any string is not read.
        if key not in unread:
            try:
                load_drafter(folder, damaged)
            except ValueError as error:
                assert_explained(error, key, damage)
            else:
                unread |= {key} if damage == "?" else set()
