"""Windows and RoPE by layer are read like transformers' configuration classes."""

import importlib
import json
import shutil

import numpy as np
import pretrained
import pytest
from pretrained.rope import frequencies
from support.checkpoints import checkpoint_fixtures as fixtures

from jkv.config.families import FAMILIES
from jkv.config.layer_kinds import is_switched_off

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.one_end
OFF = {"use_sliding_window": False}
WITH_WINDOWS = [
    name
    for name, family in FAMILIES.items()
    if family.window or family.full_every or family.kinds
]


@pytest.mark.parametrize("model_type", WITH_WINDOWS)
def test_a_window_is_disabled_only_if_the_class_has_a_switch(model_type):
    """Other classes ignore the key."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    parts = transformers.CONFIG_MAPPING[model_type].__mro__
    annotated = [vars(each).get("__annotations__", {}) for each in parts]
    has_switch = any("use_sliding_window" in each for each in annotated)
    assert is_switched_off({"model_type": model_type} | OFF) == has_switch


def with_switch(name, folder):
    """Copy a checkpoint with windows and a key that seems to disable them."""
    shutil.copytree(fixtures.FIXTURES / name, folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    assert settings.get("sliding_window")
    path.write_text(json.dumps(settings | OFF))
    return folder


WINDOWED = ("mistral", "gemma2", "gemma3", "gpt_oss", "phi3", "cohere2", "olmo3")


@pytest.mark.parametrize("name", (*WINDOWED, "exaone4", "mixtral"))
def test_a_key_of_another_architecture_has_no_effect(name, tmp_path):
    """Neither on the parsed settings nor on the logits of transformers."""
    torch = pytest.importorskip("torch")
    folder = with_switch(name, tmp_path / name)
    config = pretrained.read_config(folder)
    assert config == pretrained.read_config(fixtures.FIXTURES / name)
    assert any(config.windows)
    kind = getattr(transformers, fixtures.CASES[name].class_name)
    options = dict(dtype=torch.float32, attn_implementation="eager")
    model = kind.from_pretrained(folder, **options).eval()
    expected = np.load(fixtures.FIXTURES / name / "expected.npz")
    end = expected["prompt_lengths"][0]
    with torch.no_grad():
        tokens = torch.tensor(expected["prompts"][None, :end]).long()
        logits = model(tokens).logits[0].numpy()
    np.testing.assert_allclose(logits, expected["prefill"][:end], atol=2e-4, rtol=0)


def test_qwens_window_switch_is_read():
    folder = fixtures.FIXTURES / "qwen3"
    settings = json.loads((folder / "config.json").read_text())
    settings |= dict(sliding_window=8, max_window_layers=0, layer_types=None)
    for is_on in (True, False):
        config = pretrained.parse_config(settings | dict(use_sliding_window=is_on))
        assert any(config.windows) == is_on


@pytest.mark.parametrize("has_kinds", [True, False])
def test_exaones_pattern_may_be_letters(has_kinds):
    """As in EXAONE-4.0-32B; the last layer has full attention."""
    settings = json.loads((fixtures.FIXTURES / "exaone4" / "config.json").read_text())
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    settings |= dict(num_hidden_layers=5, sliding_window_pattern="LLG")
    kinds = [*kinds, "sliding_attention", "full_attention"]
    settings["layer_types"] = kinds if has_kinds else None
    config = pretrained.parse_config(settings)
    assert config.windows == (8, 8, None, 8, None)
    assert [rope is not None for rope in config.ropes] == [1, 1, 0, 1, 0]


def test_exaone_without_windows_as_transformers_writes_it():
    """EXAONE-4.0-1.2B, saved again: its pattern is 0."""
    settings = json.loads((fixtures.FIXTURES / "exaone4" / "config.json").read_text())
    kinds = ["full_attention"] * settings["num_hidden_layers"]
    settings |= dict(sliding_window=None, layer_types=kinds)
    written = transformers.AutoConfig.for_model(**settings).to_dict()
    assert written["sliding_window_pattern"] == 0
    config = pretrained.parse_config(written)
    assert not any(config.windows) and all(config.ropes)


LINEAR = dict(rope_type="linear", factor=2.0)
KINDS = dict(
    full_attention=LINEAR | dict(rope_theta=3e5),
    sliding_attention=dict(rope_type="default", rope_theta=2e4),
)


@pytest.mark.parametrize(
    "rope",
    [
        {},
        dict(rope_theta=3e5),
        dict(rope_theta=3e5, rope_local_base_freq=2e4),
        dict(rope_theta=3e5, rope_scaling=LINEAR),
        dict(rope_scaling=LINEAR | dict(rope_theta=4e5)),
        dict(rope_parameters=dict(rope_type="default", rope_theta=3e5)),
        dict(rope_parameters=LINEAR | dict(rope_theta=3e5)),
        dict(rope_parameters=dict(rope_type="default", rope_theta=3e5), rope_theta=4e5),
        dict(rope_parameters=KINDS),
        dict(rope_parameters=KINDS, rope_theta=5e5),
        dict(rope_parameters=KINDS, rope_scaling=dict(rope_type="linear", factor=8.0)),
        dict(rope_parameters=dict(full_attention=KINDS["full_attention"])),
        dict(rope_parameters=dict(sliding_attention=KINDS["sliding_attention"])),
        dict(rope_parameters=dict(KINDS, sliding_attention=None)),
    ],
)
@pytest.mark.parametrize("name", ["olmo3", "gemma3"])
def test_rope_bases_by_layer_equal_transformers(name, rope):
    """Flat rope_parameters do not apply to layers of two kinds."""
    settings = json.loads((fixtures.FIXTURES / name / "config.json").read_text())
    for key in (
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_local_base_freq",
    ):
        settings.pop(key, None)
    settings |= json.loads(json.dumps(rope))
    config = pretrained.parse_config(settings)
    kinds = [
        "sliding_attention" if window else "full_attention" for window in config.windows
    ]
    theirs = transformers.AutoConfig.for_model(**settings)
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    rotary = getattr(module, f"{name.capitalize()}RotaryEmbedding")(theirs)
    for rope_here, kind in zip(config.ropes, kinds, strict=True):
        expected = getattr(rotary, f"{kind}_inv_freq").numpy()
        np.testing.assert_allclose(frequencies(rope_here), expected, rtol=1e-6)
