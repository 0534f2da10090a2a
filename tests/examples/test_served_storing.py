"""A server's cached blocks are stored in a folder that the next start reads."""

import argparse

import numpy as np
import pytest

pytest.importorskip("tokenizers")
from served import loading, renewing, storing
from support.serving.http_server import SIZES

pytestmark = [pytest.mark.one_end, pytest.mark.slow]


def parse(folder, *more):
    parser = argparse.ArgumentParser()
    loading.add_options(parser)
    words = [*SIZES.split(), "--store", "1MB", "--store-folder", str(folder), *more]
    return parser.parse_args(words)


def load(folder, *more):
    return loading.load(parse(folder, *more))


@pytest.mark.further
def test_a_restart_restores_stored_blocks(tmp_path, capsys):
    prompts = np.random.default_rng(0).integers(9, 3000, (6, 60)).tolist()
    served, completions = load(tmp_path), []
    assert served.store.version == storing.find_version(loading.BUNDLED)
    for prompt in prompts:  # three blocks and a part each; the pool has twelve
        (found,) = served.engine.generate([prompt], max_new_tokens=3)
        completions.append(found.tokens)
    served.engine.close()
    served.end()
    assert "of blocks go to the folder" in capsys.readouterr().out
    served = load(tmp_path)
    for prompt, tokens in zip(prompts, completions, strict=True):
        (found,) = served.engine.generate([prompt], max_new_tokens=3)
        assert found.tokens == tokens
    stats = served.engine.stats()
    assert stats.restored_tokens == stats.cached_tokens > 100
    assert stats.store_folder_bytes > 0


def copy_model(path, **changes):
    """Copy the bundled model, with the given files' bytes changed."""
    path.mkdir()
    for each in loading.BUNDLED.iterdir():
        change = changes.get(each.name.replace(".", "_"), bytes)
        (path / each.name).write_bytes(change(each.read_bytes()))
    return path


def flip(place):
    def change(data):
        data = bytearray(data)
        data[int(place * (len(data) - 1))] ^= 1
        return bytes(data)

    return change


def test_a_folder_of_other_weights_is_refused(tmp_path):
    load(tmp_path / "kept")
    model = copy_model(tmp_path / "model", model_safetensors=flip(1.0))
    with pytest.raises(ValueError, match="must have version .* pass another folder"):
        load(tmp_path / "kept", "--model", str(model))


def test_the_version_depends_only_on_weights_and_configuration(tmp_path):
    """Wherever a weights file differs, not only at its ends."""
    own = storing.find_version(loading.BUNDLED)
    assert storing.find_version(copy_model(tmp_path / "same")) == own
    tokenizer = copy_model(tmp_path / "tokenizer", README_md=flip(0.5))
    assert storing.find_version(tokenizer) == own
    found = {own}
    for place in (0.0, 0.3, 0.5, 0.7, 1.0):
        changed = dict(model_safetensors=flip(place))
        found.add(storing.find_version(copy_model(tmp_path / f"{place}", **changed)))
    theta = dict(config_json=lambda data: data.replace(b"10000", b"20000"))
    changed = copy_model(tmp_path / "theta", **theta)
    assert b"20000" in (changed / "config.json").read_bytes()
    found.add(storing.find_version(changed))
    assert len(found) == 7


@pytest.mark.further
def test_reloaded_weights_share_no_blocks_with_older_ones(tmp_path):
    """The same for two servers of one folder, one of which reloads its weights."""
    model = copy_model(tmp_path / "model")
    words = tmp_path / "kept", "--model", str(model)
    first, second = load(*words), load(*words)
    prompt = np.random.default_rng(0).integers(9, 3000, 60).tolist()
    (before,) = second.engine.generate([prompt], max_new_tokens=3)
    second.engine.close()
    second.end()
    weights = model / "model.safetensors"
    weights.write_bytes(change_numbers(weights.read_bytes()))
    renewing.renew(first, parse(*words))
    (found,) = first.engine.generate([prompt], max_new_tokens=3)
    assert found.cached_tokens == 0 and found.tokens != before.tokens
    first.engine.close()
    first.end()
    (again,) = second.engine.generate([prompt], max_new_tokens=3)
    assert again.tokens == before.tokens  # of the old weights
    third = load(*words)  # the next start finds the first one's blocks
    (again,) = third.engine.generate([prompt], max_new_tokens=3)
    assert again.tokens == found.tokens and again.cached_tokens == 48


def change_numbers(data):
    """Flip the sign of the second half of a file's numbers."""
    half = len(data) // 4 * 2
    numbers = np.frombuffer(data[half:], np.uint8).copy()
    numbers[1::2] ^= 0x80
    return data[:half] + numbers.tobytes()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--store-folder", "f"], "pass --store or --store-folder-bytes"),
        (["--store-folder-bytes", "1MB"], "needs --store-folder"),
    ],
)
def test_incomplete_options_are_refused_by_name(words, message):
    parser = argparse.ArgumentParser()
    loading.add_options(parser)
    with pytest.raises(ValueError, match=message):
        storing.make_store(parser.parse_args(words))
