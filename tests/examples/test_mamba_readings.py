"""Configurations of models with Mamba 2 or short convolutions, in old and new forms."""

import math

import pretrained
import pytest

pytestmark = pytest.mark.one_end

SMALL = dict(
    vocab_size=8,
    hidden_size=16,
    num_hidden_layers=2,
    intermediate_size=12,
    num_attention_heads=2,
    num_key_value_heads=1,
)
SPACE = dict(mamba_n_heads=4, mamba_d_state=8)
FALCON = SMALL | SPACE | dict(model_type="falcon_h1")


def test_old_lfm2_files():
    """If both names exist, the authors' are used."""
    settings = SMALL | dict(
        model_type="lfm2",
        block_ff_dim=48,
        block_multiple_of=20,
        tie_embedding=False,
        full_attn_idxs=[1],
        norm_eps=1e-4,
    )
    config = pretrained.parse_config(settings)
    # Two thirds of 48 are 32; the next multiple of 20 is 40.
    assert (config.intermediate_size, config.tied) == (40, False)
    assert config.mixers == (("short_convolution",), ("attention",))
    assert config.norm_epsilon == 1e-4 and config.ropes[1].theta == 1e6
    del settings["intermediate_size"]
    assert pretrained.parse_config(settings) == config
    plain = settings | dict(block_auto_adjust_ff_dim=False)
    assert pretrained.parse_config(plain).intermediate_size == 48


def test_nemotron_layers_by_letters():
    settings = SMALL | dict(
        model_type="nemotron_h",
        hybrid_override_pattern="M-*",
        num_hidden_layers=3,
        mamba_num_heads=4,
        mamba_head_dim=4,
        n_groups=2,
    )
    config = pretrained.parse_config(settings)
    assert config.mixers == (("mamba2",), (), ("attention",))
    assert config.fed_layers == (False, True, False)
    assert config.ropes == (None,) * 3 and config.experts is None
    assert config.state_space.step_limits == (0.001, math.inf)
    named = settings | dict(
        layers_block_type=["linear_attention", "mlp", "full_attention"]
    )
    del named["hybrid_override_pattern"], named["num_hidden_layers"]
    assert pretrained.parse_config(named) == config


def test_infinity_in_json_configs():
    """transformers writes a dict, older files a word that Python parses."""
    for limit in math.inf, {"__float__": "Infinity"}:
        settings = FALCON | dict(mamba_d_ssm=32, time_step_limit=[0.5, limit])
        config = pretrained.parse_config(settings)
        assert config.state_space.step_limits == (0.5, math.inf)


def test_falcon_h1_sizes_omitted_and_null():
    assert pretrained.parse_config(FALCON).state_space.head_dim == 1024 // 4
    config = pretrained.parse_config(FALCON | dict(mamba_d_ssm=None))
    assert config.state_space.head_dim == 2 * 16 // 4


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="zamba2"), "names the architecture 'zamba2'"),
        (dict(model_type="jamba"), "names the architecture 'jamba'"),
        (
            dict(model_type="granitemoehybrid", layer_types=["mamba", "rwkv"]),
            "the kinds of 2 layers .*rwkv",
        ),
        (
            dict(model_type="granitemoehybrid", position_embedding_type="alibi"),
            "'alibi' is not supported, only 'rope', 'nope' and null",
        ),
        (dict(model_type="lfm2_moe", use_expert_bias=False), "use_expert_bias"),
        (dict(ssm_multipliers=[1.0, 2.0]), "ssm_multipliers.* 5 numbers above 0"),
        (dict(mamba_d_head=5), "1024 channels .* 4 heads of 5"),
        (dict(mamba_d_ssm=32, mamba_n_groups=3), "4 heads cannot share 3 groups"),
        (dict(hidden_act="gelu_pytorch_tanh"), "hidden_act 'gelu.* behind Mamba 2"),
    ],
)
def test_unsupported_mamba_settings_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        pretrained.parse_config(FALCON | changes)
