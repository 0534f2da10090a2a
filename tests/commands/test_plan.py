"""python -m jkv.plan: sizes that fit, and reasons against others."""

import importlib
import os
import re
import subprocess
import sys
import tomllib

import pytest
from support.checkpoints.config_json import LLAMA, folder
from support.paths import EXAMPLES, ROOT

import jkv
import jkv.__main__ as listed
from jkv.commands.capacity import main, make_plan
from jkv.formats.table import COSTS, format_cost

pytestmark = pytest.mark.one_end
PYDOC = EXAMPLES / "models" / "pydoc"
SIZES = dict(num_layers=2, num_kv_heads=2, head_dim=8)


def test_a_plan_computed_by_hand(tmp_path):
    path = folder(tmp_path, **LLAMA)
    found = make_plan(path, "192GiB", tensor_parallel=8, weights="16GiB", reserve=0.25)
    # 192 minus a quarter and an eighth of 16 GiB; one of 8 heads per device.
    assert found.budget == (192 - 48 - 2) * 2**30
    assert found.config.num_kv_heads == 1
    assert found.bytes_per_token == 8 * found.config.bytes_per_token == 128 * 1024
    assert found.config.bytes <= found.budget
    # 142 GiB at 16 KiB a token are 9,306,112 tokens: 71 times 131,072, minus tables.
    assert found.sequences[131_072] == 70
    assert list(found.sequences) == [1024, 4096, 16_384, 65_536, 131_072]
    assert not found.notes


def test_every_reported_number_fits_and_no_more(tmp_path):
    found = make_plan(folder(tmp_path, **LLAMA), "24GB", weights="1GB")
    sizes = dict(num_layers=32, num_kv_heads=8, head_dim=128)
    for length, number in found.sequences.items():
        if number:
            exact = jkv.CacheConfig.for_context_length(
                length, max_sequences=number, **sizes
            )
            assert exact.bytes <= found.budget
        more = jkv.CacheConfig.for_context_length(
            length, max_sequences=number + 1, **sizes
        )
        assert more.bytes > found.budget


def test_weights_in_the_folder_are_subtracted():
    weights = (PYDOC / "model.safetensors").stat().st_size
    found = make_plan(PYDOC, "1GiB", reserve=0.0)
    assert (found.weights, found.budget) == (weights, 2**30 - weights)


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (["model-00001-of-00002", "model-00002-of-00002", "consolidated"], 2),
        (["model", "model.fp16", "consolidated"], 1),
        (["consolidated.00", "consolidated.01"], 2),
    ],
)
def test_weights_in_two_formats_are_subtracted_once(tmp_path, names, count):
    path = folder(tmp_path, **LLAMA)
    for name in names:
        (path / f"{name}.safetensors").write_bytes(b"0" * 1000)
    assert make_plan(path, "24GB").weights == 1000 * count


def test_more_devices_than_heads(tmp_path):
    path = folder(tmp_path, **LLAMA)
    found = make_plan(path, "80GB", tensor_parallel=16)
    assert found.config.num_kv_heads == 1
    assert "each kv head is kept by 2 devices" in found.notes
    assert any("no weight files found" in note for note in found.notes)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(tensor_parallel=3), "multiple of the model's 8 kv heads, got 3"),
        (dict(tensor_parallel=0), "at least 1 device"),
        (dict(step_tokens=0), "step_tokens must be at least 1, got 0"),
        (dict(weights="90GB"), "leave nothing for a cache"),
        (dict(reserve=1.5), "reserve must be >= 0 and < 1"),
        (dict(memory="lots"), "not a number of bytes"),
        (dict(memory="1MB"), "a single block takes"),
        (dict(memory="80"), "got 80; write 80GB or 80GiB"),
        (dict(memory=192), "got 192; write 192GB"),
    ],
)
def test_impossible_plans_give_the_reason(tmp_path, arguments, message):
    path = folder(tmp_path, **LLAMA)
    with pytest.raises(ValueError, match=message):
        make_plan(path, **dict(memory="80GB") | arguments)


def test_a_path_to_config_json_is_accepted():
    found = make_plan(PYDOC / "config.json", "1GiB", reserve=0.0)
    assert found == make_plan(PYDOC, "1GiB", reserve=0.0)
    assert found.weights > 0


def test_a_default_dtype_is_reported(tmp_path):
    path = folder(tmp_path, **LLAMA | dict(torch_dtype=None))
    found = make_plan(path, "80GB", weights="1GB")
    assert found.config.dtype.name == "float32"
    assert found.notes == ["config.json names no dtype, float32 is assumed; give dtype"]
    assert not make_plan(path, "80GB", weights="1GB", dtype="bfloat16").notes


def test_windows_are_reported_with_the_kept_tokens(tmp_path):
    """Gemma 3's layout: five of six layers have a window of 1024 tokens."""
    settings = LLAMA | dict(
        model_type="gemma3_text", num_hidden_layers=6, sliding_window=1024
    )
    path = folder(tmp_path, **settings)
    found = make_plan(path, "80GB", weights="1GB", step_tokens=256)
    a_layer = found.bytes_per_token // 6
    assert found.windows == (5, 1024)
    assert found.bytes_needed[1024] == 6 * 1024 * a_layer
    # 1,023 tokens before a row, 256 of its step and 256 of the previous step are in at
    # most 97 blocks: (1023 + 512 - 2) // 16 + 2.
    assert found.bytes_needed[131_072] == (131_072 + 5 * 97 * 16) * a_layer
    assert found.groups is not None
    assert [group.num_layers for group in found.groups.groups] == [1, 5]
    assert found.groups.bytes <= found.budget
    assert found.sequences[131_072] == found.groups.max_sequences
    head = "context length   sequences at once   bytes of each   all tokens kept"
    assert head in found.report()
    assert found.notes[-1].startswith("5 of 6 layers have a window of 1024 tokens")
    # An index takes a little of the groups' memory; a window for all layers is one
    # pool.
    indexed = make_plan(path, "80GB", weights="1GB", prefix_caching=True)
    assert indexed.groups is not None and indexed.groups.prefix_caching
    assert indexed.sequences[131_072] <= found.sequences[131_072]
    plain = make_plan(path, "80GB", weights="1GB", sliding_window=512)
    assert plain.windows is None and plain.groups is None


# Layers, windowed layers, window, kv heads, head dim, longest context; and the bytes of
# one longest sequence by hand: tokens of full layers, then windows in blocks of 16,
# (window + 1,021) // 16 + 2 blocks, times keys and values of 2 bytes.
MODELS = {
    "Llama 3.1 8B": ((32, 0, None, 8, 128, 131_072), 17_179_869_184),
    "Mistral 7B 0.1": ((32, 32, 4096, 8, 128, 32_768), 673_185_792),
    "Gemma 2 9B": ((42, 21, 4096, 8, 256, 8192), 2_292_842_496),
    "Gemma 3 27B": ((62, 52, 1024, 16, 128, 131_072), 11_616_649_216),
    "gpt-oss 20B": ((24, 12, 128, 8, 64, 131_072), 3_249_930_240),
    "gpt-oss 120B": ((36, 18, 128, 8, 64, 131_072), 4_874_895_360),
}


@pytest.mark.parametrize("name", MODELS)
def test_real_models_take_the_bytes_computed_by_hand(tmp_path, name):
    (layers, windowed, window, heads, head_dim, longest), expected = MODELS[name]
    every = layers // max(layers - windowed, 1) if windowed < layers else None
    settings = LLAMA | dict(
        num_hidden_layers=layers,
        num_key_value_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=longest,
        sliding_window=window,
        sliding_window_pattern=every if window else None,
    )
    found = make_plan(folder(tmp_path, **settings), "192GiB", weights="1GB")
    assert (found.windows.num_layers if found.windows else 0) == windowed
    assert found.bytes_needed[longest] == expected


def test_the_command_prints_the_capacity(tmp_path):
    path = folder(tmp_path, **LLAMA, sliding_window=4096)
    command = [sys.executable, "-W", "error", "-m", "jkv.plan"]
    options = [
        *("--model", str(path), "--memory", "192GiB", "--tensor-parallel", "8"),
        *("--weights", "15GiB", "--block-size", "32"),
    ]
    done = subprocess.run(
        command + options,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "memory      192.0 GiB on each of 8 devices"
    assert "1.9 GiB weights, 19.2 GiB reserve = 170.9 GiB for" in lines[1]
    assert "32 layers, 1 kv heads of 128, bfloat16" in lines[2]
    assert lines[2].startswith("group 0") and "a window of 4,096 tokens" in lines[2]
    assert " blocks of 32 = " in lines[3]
    assert "per token   128.0 KiB, 16.0 KiB on each" in lines
    costs = [format_cost(*dtypes) for dtypes in COSTS]
    times = ["formats     int8: 2.0", "e4m3fn: 2.0", "int4 values: 2.6", "int4: 3.9"]
    first = next(i for i, line in enumerate(lines) if line.startswith("formats"))
    for line, start, cost in zip(lines[first : first + 4], times, costs, strict=True):
        assert f"{start} times the tokens, perplexity {cost}" in line
    rows = [line.split() for line in lines if line[:14].strip("0123456789, ") == ""]
    lengths = [int(row[0].replace(",", "")) for row in rows if len(row) == 6]
    assert lengths == [1024, 4096, 16_384, 65_536, 131_072]
    # 128 KiB a token; all layers keep 4,095 tokens and two steps of 512.
    assert rows[-1][2:] == ["644.0", "MiB", "16.0", "GiB"]
    assert lines[-1].startswith("note: 32 of 32 layers have a window of 4096 tokens")


def test_the_command_fails_in_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(tmp_path), "--memory", "1GB"])
    output = ended.value.code  # Python prints a string, and exits with 1
    assert output.startswith("error: ") and "\n" not in output
    assert "config.json is missing" in output and not capsys.readouterr().out


@pytest.mark.parametrize(
    "option, message",
    [
        (("--tensor-parallel", "x"), "invalid int value: 'x'"),
        (("--tensor-parallel", "0"), "at least 1 device"),
        (("--reserve", "nan"), "reserve must be >= 0 and < 1, got nan"),
        (("--dtype", "int3"), "dtype must be one of"),
        (("--memory", "lots"), "not a number of bytes"),
        (("--speed", "9"), "unrecognized arguments: --speed 9"),
    ],
)
def test_invalid_values_exit_with_status_2(capsys, option, message):
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(PYDOC), "--memory", "1GiB", *option])
    output = capsys.readouterr()
    assert ended.value.code == 2 and message in output.err and not output.out
    assert output.err.startswith("error: ") and output.err.count("\n") == 1


def test_the_report_relates_its_two_tables(tmp_path):
    """Above there are 256 sequences, below 458 of the same length."""
    for path, windows in (PYDOC, {}), (None, dict(sliding_window=4096)):
        found = make_plan(path or folder(tmp_path, **LLAMA, **windows), "24GiB")
        output = " ".join(found.report().split())
        shown = found.groups or found.config
        assert f"tables {shown.max_sequences:,} sequences of up to" in output
        assert (
            f"The tables above are for {shown.max_sequences:,} sequences. Each line "
            "below is a configuration of its own, with tables for all sequences of its "
            "length that fit (max_sequences): context length"
        ) in output


def test_python_m_jkv_lists_the_commands(capsys):
    listed.main([])
    output = capsys.readouterr().out
    for command in listed.COMMANDS + listed.OF_EXAMPLES:
        line = rf"^  {command.name} +{command.purpose} +docs/{command.page}$"
        assert re.search(line, output, re.M)
        # The page names the command.
        page = (ROOT / "docs" / command.page).read_text()
        assert command.name.removeprefix("python -m ") in page
    modules = {each.name.removeprefix("python -m ") for each in listed.COMMANDS}
    for name in modules:
        assert callable(importlib.import_module(name).main)
    files = {path.stem: path.read_text() for path in (ROOT / "jkv").glob("*.py")}
    faces = {name for name, text in files.items() if '__name__ == "__main__"' in text}
    assert modules == {f"jkv.{name}" for name in faces - {"__main__"}}
    project = tomllib.loads((ROOT / "examples" / "pyproject.toml").read_text())
    assert {each.name for each in listed.OF_EXAMPLES} == {
        *project["project"]["scripts"]
    }
