"""python -m jkv.doctor --model: its report, and the kernels of a GPU program."""

import jax
import jax.numpy as jnp
import pytest
from support.attention.kernel_lowering import find_kernels, lower, make_shapes
from support.paths import ROOT

from jkv.attention import backend, paged_attention
from jkv.attention.backend import DeviceType
from jkv.attention.choice import explain_choice
from jkv.commands.diagnosis import main

CHECKPOINTS = ROOT / "tests" / "fixtures" / "checkpoints"

pytestmark = pytest.mark.one_end


def find_names(queries, pools, platform, *, by_position, has_gradient):
    """Return the kernels of a call, or of its gradient, lowered for a platform."""

    def attend(queries, keys, values):
        output = paged_attention(
            queries,
            keys,
            values,
            0,
            jnp.zeros((4, 16), jnp.int32),
            None,
            *(jnp.zeros((4,), jnp.int32) for _ in range(3)),
            by_position=by_position,
        )
        return jnp.sum(output.astype(jnp.float32))

    function = jax.grad(attend, argnums=(0, 1, 2)) if has_gradient else attend
    lowered = lower(function, (queries, pools.keys, pools.values), platform)
    return {kernel.name for kernel in find_kernels(lowered)}


@pytest.mark.parametrize(
    "target, options, forward, derivative",
    [
        ("gfx942", dict(head_dim=64, dtype="float32"), True, True),
        ("gfx1201", dict(head_dim=128, dtype="float32"), False, False),
        ("gfx1100", dict(head_dim=64, dtype="float16"), True, True),
        ("gfx1100", dict(head_dim=112, dtype="float16"), True, False),
        ("sm_90", dict(head_dim=72, dtype="float16", block_size=24), True, True),
        ("sm_90", dict(head_dim=20, dtype="float16"), False, False),
        ("sm_100", dict(head_dim=64, dtype="float32"), False, True),
    ],
)
def test_programs_contain_the_reported_kernels(
    monkeypatch, target, options, forward, derivative
):
    platform = "rocm" if target.startswith("gfx") else "cuda"
    monkeypatch.setattr(backend, "find_target", {platform: target}.get)
    queries, pools = make_shapes(group=2, kv_heads=1, has_bits=False, **options)
    reasons = explain_choice(queries, pools, DeviceType(platform, target))
    assert (reasons.forward is None, reasons.derivative is None) == (
        forward,
        derivative,
    )
    for by_position in (False, True):
        names = find_names(
            queries, pools, platform, by_position=by_position, has_gradient=False
        )
        assert bool(names) == forward, names
    names = find_names(queries, pools, platform, by_position=False, has_gradient=True)
    gradients = {"jkv_query_gradients", "jkv_token_gradients"}
    assert (gradients <= names) == derivative and bool(gradients & names) == derivative


def test_other_platforms_have_no_kernels():
    forward, derivative = explain_choice(*make_shapes(), DeviceType("cpu", None))
    assert forward == derivative == "there are kernels for rocm and cuda, not for cpu"


def output_of(capsys, *arguments):
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def test_kernels_of_a_shape_on_a_gpu(capsys):
    text = output_of(
        capsys, "--model", "num_kv_heads=8,head_dim=128", "--gpu", "gfx942"
    ).splitlines()
    (line,) = text[3:]
    assert line.endswith("float32: the kernel, with exact= too; its gradient: a kernel")
    text = output_of(
        capsys, "--model", "num_kv_heads=8,head_dim=128", "--gpu", "sm_80"
    ).splitlines()
    assert text[:2] == [
        "sm_80:",
        "  1 layers, 8 kv heads of 128, bfloat16, blocks of 16",
    ]
    assert text[2].startswith(
        "    generate, Engine, kept in bfloat16, int8, float8_e4m3fn"
    )
    assert text[2].endswith(": the kernel, with exact= too")
    assert text[3:] == [
        "    score, kept in float32: the plain path; its gradient: a kernel",
        "      because there is no tile for head dim 128 with bfloat16 and float32 on "
        "sm_80",
    ]


def test_kernels_of_mixed_shared_and_recurrent_layers(capsys):
    text = output_of(capsys, "--model", str(CHECKPOINTS / "gemma4"), "--gpu", "gfx942")
    assert text.count(" kv heads of ") == 2
    text = output_of(
        capsys, "--model", str(CHECKPOINTS / "deepseek_v3"), "--gpu", "sm_90"
    )
    assert "for keys and" in text
    text = output_of(capsys, "--model", str(CHECKPOINTS / "bamba"), "--gpu", "sm_90")
    assert "recurrent-state layers: XLA, without a kernel" in text
    text = output_of(
        capsys,
        *("--model", "num_kv_heads=8,head_dim=20", "--block-size", "24"),
        *("--gpu", "sm_90"),
    )
    assert text.count("because the key head dim must be a multiple of 8") == 2


def test_the_local_gpu_is_the_default(capsys, monkeypatch):
    text = output_of(capsys, "--model", "num_kv_heads=1,head_dim=64")
    cards = [line for line in text.splitlines() if line.endswith(":")]
    assert {"gfx942:", "gfx1201:", "sm_90:", "sm_100:"} <= {*cards}
    assert text.startswith("no GPU found")
    known = {"rocm": "gfx950"}
    monkeypatch.setattr("jkv.attention.backend.find_target", known.get)
    text = output_of(capsys, "--model", "num_kv_heads=1,head_dim=64")
    assert text.startswith("gfx950:\n") and text.count("layers,") == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", "nowhere"], "config.json is missing"),
        (["--model", "head_dim=64"], "must include num_kv_heads"),
        (["--model", "heads=4"], "dtype, got 'heads'"),
        (["--model", "num_kv_heads=a,head_dim=64"], "invalid literal"),
        (["--model", "num_kv_heads=1,head_dim=64", "--gpu", "H100"], "must be a name"),
        (["--gpu", "sm_90"], "require --model"),
        (["--model", "a", "--quick"], "omit --report and --quick"),
        (["--first-light", "--quick"], "excludes --quick and --model"),
        (["--first-light", "--model", "a"], "excludes --quick and --model"),
    ],
)
def test_invalid_arguments_print_one_line(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    text = capsys.readouterr().err
    assert ended.value.code == 2 and words in text and text.count("\n") == 1
