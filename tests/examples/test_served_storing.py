"""A server's cached blocks outlive it, in a folder that the next start finds."""

import argparse

import numpy as np
import pytest
from support.paths import EXAMPLES

pytest.importorskip("tokenizers")
from served import loading, storing
from support.http_server import SIZES

pytestmark = [pytest.mark.one_end, pytest.mark.slow]


def load(folder, *more):
    parser = argparse.ArgumentParser()
    loading.add_options(parser)
    words = [*SIZES.split(), "--store", "1MB", "--store-folder", str(folder), *more]
    return loading.load(parser.parse_args(words))


def test_the_next_start_finds_what_was_computed(tmp_path, capsys):
    prompts = np.random.default_rng(0).integers(9, 3000, (6, 60)).tolist()
    served, texts = load(tmp_path), []
    assert served.store.version == storing.find_version(loading.BUNDLED)
    for prompt in prompts:  # of three blocks and a part: the pool has twelve
        (found,) = served.engine.generate([prompt], max_new_tokens=3)
        texts.append(found.tokens)
    served.engine.close()
    served.end()
    assert "of blocks go to the folder" in capsys.readouterr().out
    served = load(tmp_path)
    for prompt, tokens in zip(prompts, texts, strict=True):
        (found,) = served.engine.generate([prompt], max_new_tokens=3)
        assert found.tokens == tokens
    stats = served.engine.stats()
    assert stats.restored_tokens == stats.cached_tokens > 100
    assert stats.store_folder_bytes > 0


def test_a_folder_of_other_weights_is_refused(tmp_path):
    load(tmp_path / "kept")
    model = tmp_path / "model"
    model.mkdir()
    for path in (EXAMPLES / "models" / "pydoc").iterdir():
        data = bytearray(path.read_bytes())
        data[-1] ^= path.suffix == ".safetensors"
        (model / path.name).write_bytes(data)
    with pytest.raises(ValueError, match="holds blocks of version .* remove that one"):
        load(tmp_path / "kept", "--model", str(model))
