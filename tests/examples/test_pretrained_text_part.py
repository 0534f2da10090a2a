"""The text part of vision-language models: Gemma 3 from 4B on, and others."""

import json

import jax
import numpy as np
import pretrained
import pytest
from safetensors.numpy import load_file, save_file
from support.checkpoints import checkpoint_fixtures as fixtures
from test_pretrained_parity import HAS_TRANSFORMERS

import jkv

pytestmark = pytest.mark.one_end
PLAIN = fixtures.FIXTURES / "gemma3"
# Naming schemes: the authors' and transformers', and transformers 5.0's.
FORMS = {
    "authors": dict(model="language_model.model.", head="language_model.lm_head."),
    "newer": dict(model="model.language_model.", head="lm_head."),
}


def wrap_by_hand(folder, form, **beside):
    """Rewrite the text checkpoint as the text part of a vision-language one."""
    settings = json.loads((PLAIN / "config.json").read_text())
    names = settings.pop("architectures"), settings.pop("model_type")
    assert names == (["Gemma3ForCausalLM"], "gemma3_text")
    dtype = settings.pop("torch_dtype")
    around = dict(
        model_type="gemma3",
        architectures=["Gemma3ForConditionalGeneration"],
        text_config=settings,
        vision_config=fixtures.VISION,
        torch_dtype=dtype,
        **beside,
    )
    (folder / "config.json").write_text(json.dumps(around))
    begin = FORMS[form]
    tensors = {
        begin["head"] + name.removeprefix("lm_head.")
        if name.startswith("lm_head.")
        else begin["model"] + name.removeprefix("model."): tensor
        for name, tensor in load_file(PLAIN / "model.safetensors").items()
    }
    outer = "model." if form == "newer" else ""
    for name in ("vision_tower.probe", "multi_modal_projector.weight"):
        tensors[outer + name] = np.ones(2, np.float32)
    save_file(tensors, folder / "model.safetensors")


def assert_is_the_plain_one(folder):
    """Assert equal settings, weights and logits."""
    model, params = pretrained.load(folder)
    plain, plain_params = pretrained.load(PLAIN)
    assert model.config == plain.config
    jax.tree.map(np.testing.assert_array_equal, params, plain_params)


@pytest.mark.parametrize("form", FORMS)
def test_the_text_part_equals_the_text_model(tmp_path, form):
    wrap_by_hand(tmp_path, form)
    assert_is_the_plain_one(tmp_path)
    found = jkv.CacheConfig.from_model(tmp_path, num_blocks=2)
    assert found == jkv.CacheConfig.from_model(PLAIN, num_blocks=2)


@pytest.mark.parametrize(
    "name, kind, form, others",
    [
        ("gemma4", "gemma4", "newer", ["audio_tower.a", "embed_vision.b"]),
        ("ministral3", "mistral3", "authors", ["vision_tower.a"]),
        ("mistral4", "mistral3", "newer", ["multi_modal_projector.a"]),
    ],
)
def test_text_parts_of_other_models(tmp_path, name, kind, form, others):
    plain = fixtures.FIXTURES / name
    settings = json.loads((plain / "config.json").read_text())
    del settings["architectures"]
    around = dict(model_type=kind, text_config=settings)
    (tmp_path / "config.json").write_text(json.dumps(around))
    begin, outer = FORMS[form], "model." if form == "newer" else ""
    stored = load_file(plain / "model.safetensors")
    if name == "gemma4":
        # Published with unused projections in the layers that share keys.
        for unused in ("k_proj", "v_proj", "k_norm"):
            stored[f"model.layers.2.self_attn.{unused}.weight"] = np.ones(2)
    tensors = {
        begin["head"] + each.removeprefix("lm_head.")
        if each.startswith("lm_head.")
        else begin["model"] + each.removeprefix("model."): tensor
        for each, tensor in stored.items()
    }
    for other in others:
        tensors[outer + other] = np.ones(2, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    model, params = pretrained.load(tmp_path)
    expected, expected_params = pretrained.load(plain)
    assert model.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="no transformers")
def test_transformers_gives_the_same_with_vision(tmp_path):
    import torch
    import transformers

    text = transformers.AutoConfig.from_pretrained(PLAIN)
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=fixtures.VISION,
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
        dtype="float16",
    )
    kind = transformers.Gemma3ForConditionalGeneration
    model = kind(config)
    plain = transformers.Gemma3ForCausalLM.from_pretrained(PLAIN, dtype="float32")
    model.model.language_model.load_state_dict(plain.model.state_dict())
    model.lm_head.load_state_dict(plain.lm_head.state_dict())
    model.to(torch.float16).save_pretrained(tmp_path)
    assert_is_the_plain_one(tmp_path)

    # The parity tests cover the text model's logits.
    expected = np.load(PLAIN / "expected.npz")
    first = int(expected["prompt_lengths"][:1].sum())
    rows = slice(first, first + int(expected["prompt_lengths"][1]))
    tokens = torch.tensor(expected["prompts"][rows])[None].long()
    with torch.no_grad():
        logits = kind.from_pretrained(tmp_path, dtype="float32")(tokens).logits[0]
    np.testing.assert_allclose(logits.numpy(), expected["prefill"][rows], atol=2e-4)


# Vision-language models: their vision settings, and the class of their text part.
WITH_EYES = {
    "gemma4": (
        "Gemma4",
        fixtures.VISION
        | dict(num_key_value_heads=2, head_dim=8, position_embedding_size=16),
        "Gemma4ForCausalLM",
    ),
    "ministral3": (
        "Mistral3",
        fixtures.VISION | dict(head_dim=8),
        "Ministral3ForCausalLM",
    ),
    "mistral4": ("Mistral3", fixtures.VISION | dict(head_dim=8), "Mistral4ForCausalLM"),
}


@pytest.mark.further
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="no transformers")
@pytest.mark.parametrize("name", WITH_EYES)
def test_vision_language_folders_of_transformers(tmp_path, name):
    """Names of tensors and settings equal those of the whole model's class."""
    import torch
    import transformers

    family, vision, text_class = WITH_EYES[name]
    text = transformers.AutoConfig.from_pretrained(fixtures.FIXTURES / name)
    if family == "Mistral3":
        vision = vision | dict(model_type="pixtral")
    config = getattr(transformers, f"{family}Config")(
        text_config=text,
        vision_config={n: v for n, v in vision.items() if n != "image_size"},
        tie_word_embeddings=text.tie_word_embeddings,
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    plain = getattr(transformers, text_class).from_pretrained(
        fixtures.FIXTURES / name, dtype="float32"
    )
    model.model.language_model.load_state_dict(plain.model.state_dict())
    model.lm_head.load_state_dict(plain.lm_head.state_dict())
    model.to(torch.float16).save_pretrained(tmp_path)
    loaded, params = pretrained.load(tmp_path)
    expected, expected_params = pretrained.load(fixtures.FIXTURES / name)
    assert loaded.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)


def test_settings_beside_the_text_part_apply(tmp_path):
    wrap_by_hand(tmp_path, "authors", eos_token_id=[1, 106])
    assert pretrained.read_config(tmp_path).stop_tokens == (1, 106)


def test_sizes_missing_from_the_text_part():
    part = dict(hidden_size=2560, intermediate_size=10_240, num_hidden_layers=34)
    config = pretrained.parse_config(
        dict(model_type="gemma3", text_config=part | dict(sliding_window=1024))
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.tied) == (262_208, True)
    assert config.windows.count(1024) == 29


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(text_config=None), "without a text_config"),
        (dict(architectures=["Gemma3ForSequenceClassification"]), "does not predict"),
    ],
)
def test_non_generative_checkpoints_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        pretrained.parse_config(dict(model_type="gemma3", text_config={}) | changes)


def test_unknown_text_tensors_are_refused(tmp_path):
    wrap_by_hand(tmp_path, "authors")
    path = tmp_path / "model.safetensors"
    extra = {"language_model.model.layers.0.self_attn.sinks": np.ones(2, np.float32)}
    save_file(load_file(path) | extra, path)
    with pytest.raises(ValueError, match="1 tensors that this model would not use"):
        pretrained.load(tmp_path)
