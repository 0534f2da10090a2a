"""Shapes of recurrent states from a model's config.json.

A state has a fixed size, derived from keys that differ by model type. A tensor of
several kinds of channels in a checkpoint (queries, keys and values) becomes several
arrays, so that each can be sharded by its heads.
"""

from collections.abc import Mapping
from typing import Any

from jkv.config.counts import read_count
from jkv.config.layers import Array, LayerState

# Dtype of accumulated states, for any dtype of the model.
WIDE = "float32"


def _convolve(
    channels: Mapping[str, Array],  # of a token, by name
    window: int,  # kernel size of the convolution, the newest token included
    # the rest of the state
    memory: Mapping[str, Array],
    inputs: Mapping[str, Array],  # further inputs of a token
) -> LayerState:
    """Return the state of a layer with a causal convolution over channels."""
    past = {
        f"past_{name}": Array(
            (window - 1, *array.shape),
            array.dtype,
            None if array.heads_axis is None else array.heads_axis + 1,
        )
        for name, array in channels.items()
    }
    return LayerState(
        (*past.items(), *memory.items()), (*channels.items(), *inputs.items())
    )


def _read_mamba2(
    heads: int, head_dim: int, groups: int, state_dim: int, window: int
) -> LayerState:
    """Return the state of Mamba 2 (https://arxiv.org/abs/2405.21060)."""
    # Too few groups share keys and queries (often one) to shard them.
    shared = Array((groups, state_dim))
    return _convolve(
        dict(x=Array((heads, head_dim), None, 0), b=shared, c=shared),
        window,
        dict(memory=Array((heads, head_dim, state_dim), WIDE, 0)),
        dict(step=Array((heads,), WIDE, 0)),
    )


def read_bamba(model: Mapping[str, Any]) -> LayerState:
    """Return the state of Bamba, and of Granite 4, which uses the same keys."""
    heads, expand = _counts(model, mamba_n_heads=128, mamba_expand=2)
    if model.get("mamba_d_head") in (None, "auto"):
        inner = expand * _count(model, "hidden_size")
        dim = _count(model, "mamba_d_ssm", inner) // heads
    else:
        dim = _count(model, "mamba_d_head")
    return _read_mamba2(
        heads,
        dim,
        *_counts(model, mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4),
    )


def read_falcon_h1(model: Mapping[str, Any]) -> LayerState:
    return read_bamba({"mamba_d_ssm": 1024, **model})


def read_nemotron_h(model: Mapping[str, Any]) -> LayerState:
    groups, window = model.get("mamba_n_groups", 8), model.get("mamba_d_conv", 4)
    own = dict(n_groups=groups, ssm_state_size=128, conv_kernel=window)
    return _read_mamba2(*_counts(model, mamba_num_heads=128, mamba_head_dim=64, **own))


def read_plain_mamba2(model: Mapping[str, Any]) -> LayerState:
    own = dict(n_groups=8, state_size=128, conv_kernel=4)
    return _read_mamba2(*_counts(model, num_heads=128, head_dim=64, **own))


def _read_mamba1(inner: int, state_dim: int, window: int) -> LayerState:
    """Return the state of Mamba (https://arxiv.org/abs/2312.00752)."""
    return _convolve(
        dict(x=Array((inner,), None, 0)),
        window,
        dict(memory=Array((inner, state_dim), WIDE, 0)),
        {},
    )


def read_plain_mamba1(model: Mapping[str, Any]) -> LayerState:
    inner = _count(model, "expand", 2) * _count(model, "hidden_size")
    inner = model.get("intermediate_size") or inner
    return _read_mamba1(inner, *_counts(model, state_size=16, conv_kernel=4))


def read_jamba(model: Mapping[str, Any]) -> LayerState:
    inner = _count(model, "mamba_expand", 2) * _count(model, "hidden_size")
    return _read_mamba1(inner, *_counts(model, mamba_d_state=16, mamba_d_conv=4))


def _read_delta_rule(
    key_heads: int,  # of queries and keys; each serves several heads of the state
    heads: int,  # of the state
    key_dim: int,
    value_dim: int,
    window: int,  # kernel size of the convolution
    # decay factors of a head: 1, or one for each channel of a key
    gates: int,
) -> LayerState:
    """Return the state of a gated delta rule (https://arxiv.org/abs/2412.06464)."""
    keys = Array((key_heads, key_dim), None, 0)
    return _convolve(
        dict(query=keys, key=keys, value=Array((heads, value_dim), None, 0)),
        window,
        dict(memory=Array((heads, key_dim, value_dim), WIDE, 0)),
        dict(decay=Array((heads, gates), WIDE, 0), strength=Array((heads,), WIDE, 0)),
    )


def read_qwen3_next(model: Mapping[str, Any]) -> LayerState:
    return _read_delta_rule(
        key_heads=_count(model, "linear_num_key_heads", 16),
        heads=_count(model, "linear_num_value_heads", 32),
        key_dim=_count(model, "linear_key_head_dim", 128),
        value_dim=_count(model, "linear_value_head_dim", 128),
        window=_count(model, "linear_conv_kernel_dim", 4),
        gates=1,
    )


def read_olmo_hybrid(model: Mapping[str, Any]) -> LayerState:
    heads = _count(model, "num_attention_heads", 30)
    key_heads = _count(model, "linear_num_key_heads", heads)
    usual = 3 * _count(model, "hidden_size", 3840) // (4 * key_heads)
    key_dim = _count(model, "linear_key_head_dim", usual)
    value_dim = _count(model, "linear_value_head_dim", 2 * key_dim)
    heads = _count(model, "linear_num_value_heads", heads)
    window = _count(model, "linear_conv_kernel_dim", 4)
    return _read_delta_rule(key_heads, heads, key_dim, value_dim, window, gates=1)


def read_kimi(model: Mapping[str, Any]) -> LayerState:
    """Return the state of Kimi Linear (https://arxiv.org/abs/2510.26692)."""
    own = model.get("linear_attn_config") or {}
    heads = own.get("num_heads") or _count(model, "linear_num_heads", 32)
    dim = own.get("head_dim") or _count(model, "linear_head_dim", 128)
    window = own.get("short_conv_kernel_size")
    window = window or _count(model, "linear_conv_kernel_dim", 4)
    return _read_delta_rule(heads, heads, dim, dim, window, gates=dim)


def read_lfm3(model: Mapping[str, Any]) -> LayerState:
    return read_lfm2({"conv_L_cache": 7, **model})


def read_ling3(model: Mapping[str, Any]) -> LayerState:
    heads, window = _counts(model, num_attention_heads=32, short_conv_kernel_size=4)
    dim = _count(model, "linear_head_dim", _count(model, "head_dim", 128))
    return _read_delta_rule(heads, heads, dim, dim, window, gates=dim)


def read_lfm2(model: Mapping[str, Any]) -> LayerState:
    """Return the state of LFM2 (https://arxiv.org/abs/2511.23404)."""
    window, hidden = _count(model, "conv_L_cache", 3), _count(model, "hidden_size")
    return LayerState(
        (("past", Array((window - 1, hidden), None, 1)),),
        (("x", Array((hidden,), None, 0)),),
    )


def read_zaya(model: Mapping[str, Any]) -> LayerState:
    """Return the state of ZAYA (https://arxiv.org/abs/2510.04476)."""
    heads, kv_heads = _counts(model, num_attention_heads=8, num_key_value_heads=2)
    dim, first, second = _counts(model, head_dim=128, cca_time0=2, cca_time1=2)
    channels = dict(
        query=Array((heads, dim), None, 0),
        key=Array((kv_heads, dim), None, 0),
        # The half of the values that is those of the token before.
        value=Array((kv_heads * dim // 2,)),
    )
    return _convolve(channels, first + second - 1, {}, {})


def _counts(model: Mapping[str, Any], **usual: int) -> tuple[int, ...]:
    """Return several sizes by key, with the defaults of transformers."""
    return tuple(_count(model, key, value) for key, value in usual.items())


def _count(model: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a size, a positive int, or its default in transformers."""
    value = default if model.get(key) is None else model[key]
    field = "num_layers, the number of attention layers, to ignore states"
    return read_count(key, value, field)
