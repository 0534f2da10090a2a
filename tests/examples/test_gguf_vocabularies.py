"""Keys missing from a GGUF file's vocabulary and RoPE have llama.cpp's defaults."""

import logging
from pathlib import Path

import numpy as np
import pytest
from pretrained.gguf_reading import settings
from pretrained.gguf_reading.vocabularies import (
    find_ends,
    make_settings,
    make_tokenizer,
)
from tokenizers import pre_tokenizers

from jkv.config.gguf_file import GGUFile

pytestmark = pytest.mark.one_end
LETTERS = ["a", "b", "ab", "Ġ", "1", "2", "3", "4", "12", "!"]
BYTES = dict(model="gpt2", pre="gpt-2", merges=["a b", "1 2"])
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "a", "▁a"]


def make_file(more=(), architecture="llama", general=(), **fields):
    """Return a file with more tokens than the letters."""
    fields = BYTES | {"tokens": [*LETTERS, *more]} | fields
    metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    metadata |= {"general.architecture": architecture} | dict(general)
    return GGUFile((Path("model.gguf"),), metadata, {})


def make_pieces(**fields):
    """Return a file of SentencePiece's family."""
    fields = dict(model="llama", tokens=PIECES, scores=[0.0] * len(PIECES)) | fields
    file = make_file(**fields)
    del file.metadata["tokenizer.ggml.merges"], file.metadata["tokenizer.ggml.pre"]
    return file


def ends(*tokens, **fields):
    file = make_file(tokens, **fields)
    listed = file.metadata["tokenizer.ggml.tokens"]
    return {listed[number] for number in find_ends(file)}


@pytest.mark.parametrize(
    "pre, begins",
    [
        *((pre, True) for pre in ("llama-bpe", "llama3", "llama-v3", "falcon3")),
        *((pre, True) for pre in ("pixtral", "lfm2", "midm-2.0")),
        *((pre, False) for pre in ("gpt-2", "qwen2", "smaug-bpe", "dbrx", "smollm")),
        ("glm4", False),
        ("default", False),
    ],
)
def test_the_pretokenizer_sets_the_bos_token(pre, begins):
    """The family does not matter; an explicit key overrides the pretokenizer."""
    for fields, expected in (({}, begins), ({"add_bos_token": True}, True)) + (
        ({"add_bos_token": False}, False),
    ):
        file = make_file(["<s>"], pre=pre, bos_token_id=10, **fields)
        assert make_tokenizer(file).encode("ab").ids == [10] * expected + [2]
    # Without a BOS id none is added.
    assert make_tokenizer(make_file(["<s>"], pre=pre)).encode("ab").ids == [2]


def test_sentencepiece_has_its_own_defaults():
    """The ids of <unk>, <s> and </s>, with a BOS token and no EOS token."""
    file = make_pieces()
    tokenizer = make_tokenizer(file)
    assert tokenizer.encode("a").tokens == ["<s>", "▁a"]
    assert find_ends(file) == [2]
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert make_settings(file) == named
    file = make_pieces(add_bos_token=False, add_eos_token=True, add_space_prefix=False)
    assert make_tokenizer(file).encode("a").tokens == ["a", "</s>"]
    both = make_tokenizer(make_pieces(add_eos_token=True)).encode("a", "a").tokens
    assert both == ["<s>", "▁a", "</s>", "<s>", "▁a", "</s>"]


def test_sentencepiece_prefixes_each_text_between_special_tokens():
    """As llama.cpp, and as the tokenizers of Llama 2, Mistral 7B and TinyLlama."""
    kinds = [2, 3, 3, *[6] * 256, 1, 1, 1]
    tokenizer = make_tokenizer(make_pieces(token_type=kinds))
    found = tokenizer.encode("a</s>a<s> a").tokens
    assert found == ["<s>", "▁a", "</s>", "▁a", "<s>", "▁", "▁a"]
    assert tokenizer.encode("</s>").tokens == ["<s>", "</s>"]
    assert tokenizer.decode(tokenizer.encode(" a  a").ids) == " a  a"
    tokenizer = make_tokenizer(make_pieces(token_type=kinds, add_space_prefix=False))
    assert tokenizer.encode("a</s>a a").tokens == ["<s>", "a", "</s>", "a", "▁a"]


@pytest.mark.parametrize(
    "text",
    [
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>"),
        *("_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>"),
        *("<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
        *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<PAD>", "<reponame>"),
    ],
)
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_end_of_turn_tokens_are_found_by_their_text(text, kind):
    """Their type in the file has no effect; their text is encoded as that token."""
    tokens = ["<x>", text]
    file = make_file(tokens, token_type=[1] * len(LETTERS) + [1, kind])
    assert find_ends(file) == [11]
    encoded = make_tokenizer(file).encode(f"a{text}b")
    assert encoded.ids == [0, 11, 1]
    assert make_tokenizer(file).decode(encoded.ids) == "ab"  # not shown


def test_keys_name_additional_end_tokens():
    keys = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    for number, key in enumerate(keys):
        assert ends(*"uvwxyz", **{f"{key}_token_id": 10 + number}) == {"uvwxyz"[number]}
    # A key of this kind overrides the token found by its text.
    assert ends("u", "<|fim_pad|>", fim_pad_token_id=10) == {"u"}


def test_an_end_of_message_is_no_end_token_beside_others():
    for others in (
        ("<|return|>", "<|call|>"),
        ("<|return|>", "<|calls|>"),
        ("<|flush|>", "<|call|>"),
        ("<|flush|>", "<|calls|>"),
    ):
        assert ends("<|end|>", *others) == {*others}
    assert ends("<|end|>", "<|call|>") == {"<|end|>", "<|call|>"}
    assert ends("</s>", "<|tool_response>") == {"<|tool_response>"}
    # Tokens within an answer are shown, as they are not end tokens.
    parts = (
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
    )
    file = make_file(parts, token_type=[1] * len(LETTERS) + [3] * len(parts))
    tokenizer = make_tokenizer(file)
    ids = tokenizer.encode("".join(parts)).ids
    assert ids == [*range(10, 16)] and tokenizer.decode(ids) == "".join(parts[:4])


def test_tokens_with_non_byte_characters_are_not_split():
    """DeepSeek's byte-level vocabularies have such tokens."""
    special = ["<｜User｜>", "<｜begin▁of▁sentence｜>"]
    file = make_file(special, token_type=[1] * len(LETTERS) + [3, 3])
    assert make_tokenizer(file).encode(f"{special[1]}a{special[0]}b").ids == [
        11,
        0,
        10,
        1,
    ]


def test_phi_3_strips_white_space_after_special_tokens():
    special = ["<|user|>", "<|end|>", "<|endoftext|>"]
    for name, behind in (("Phi-3-mini", True), ("phi3", True), ("other", False)):
        file = make_file(
            special,
            general={"general.name": name},
            token_type=[1] * len(LETTERS) + [3] * 3,
        )
        encode = make_tokenizer(file).encode
        assert encode("<|user|> a").ids == ([10, 0] if behind else [10, 3, 0])
        assert encode("<|endoftext|> a").ids == [12, 3, 0]


def test_a_missing_pretokenizer_is_reported(caplog):
    with caplog.at_level(logging.WARNING):
        found = make_tokenizer(make_file(pre=None))
    assert "model.gguf does not say how texts are cut" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        fields = make_tokenizer(make_file(pre="default"))
    assert not caplog.text
    text = "ab!? 1234 ab"
    for tokenizer in (found, fields):
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text)
        # llama.cpp's default differs from GPT-2's and Llama 3's.
        assert [piece for piece, _ in pieces] == ["ab", "!?", "Ġ", "123", "4", "Ġab"]
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert plain.pre_tokenize_str(text) != pieces


def test_whole_words_are_tokens_in_llama_3():
    """Tokens without merges are found only by these pretokenizers."""
    for pre, expected in (("llama-bpe", [9]), ("smaug-bpe", [2, 0]), ("glm4", [2, 0])):
        tokens = ["a", "b", "ab", "Ġ", "1", "2", "3", "4", "12", "aba"]
        file = make_file(pre=pre, tokens=tokens)
        assert make_tokenizer(file).encode("aba").ids == expected


def test_empty_tokens_are_reported_and_duplicates_refused():
    file = make_file(["", "<|im_end|>"])
    assert find_ends(file) == [11]
    assert make_tokenizer(file).get_vocab()["[EMPTY_10]"] == 10
    with pytest.raises(ValueError, match="model.gguf: .* has 'ab' as 2 and as 10"):
        make_tokenizer(make_file(["ab"]))


@pytest.mark.parametrize("merges", [["ab"], ["a c"], ["a !"]])
def test_merges_that_are_no_pairs_of_tokens_are_refused(merges):
    words = rf"model\.gguf: tokenizer\.ggml\.merges must.*got '{merges[0]}'"
    with pytest.raises(ValueError, match=words):
        make_tokenizer(make_file(merges=merges))


def test_merges_of_sentencepiece():
    """They replace those of the vocabulary; Gemma's are always of the vocabulary."""
    for merges, expected in ((["▁ a"], ["<s>", "▁a"]), ([], ["<s>", "▁", "a"])):
        file = make_pieces()
        file.metadata["tokenizer.ggml.merges"] = merges
        assert make_tokenizer(file).encode("a").tokens == expected
    file = make_pieces(architecture="gemma3")
    file.metadata["tokenizer.ggml.merges"] = ["no pair"]
    assert make_tokenizer(file).encode("a").tokens == ["<s>", "a"]


def test_longrope_needs_its_factors():
    metadata = {"general.architecture": "phi3", "phi3.rope.scaling.type": "longrope"}
    with pytest.raises(ValueError, match=r"a\.gguf lacks the tensor rope_factors_sh"):
        settings._read_scaling(GGUFile((Path("a.gguf"),), metadata, {}))


def test_named_chat_templates():
    one = {"tokenizer.chat_template": "chat"}
    both = one | {"tokenizer.chat_template.tool_use": "tools"}
    both |= {"tokenizer.chat_templates": ["tool_use"]}
    for general, names in ((one, ["default"]), (both, ["default", "tool_use"])):
        found = make_settings(make_file(general=general))["chat_template"]
        assert [each["name"] for each in found] == names
        assert found[0]["template"] == "chat"
    assert "chat_template" not in make_settings(make_file())


def read_rope(monkeypatch, factors=None, **fields):
    metadata = {f"llama.{key.replace('__', '.')}": each for key, each in fields.items()}
    metadata |= {"general.architecture": "llama", "llama.context_length": 4096}
    tensors = {} if factors is None else {"rope_freqs.weight": None}
    monkeypatch.setattr(settings, "read_tensor", lambda *_: np.float32(factors))
    return settings._read_scaling(GGUFile((Path("a.gguf"),), metadata, tensors))


def test_rope_scaling_with_old_and_new_keys(monkeypatch):
    def read(**fields):
        return read_rope(monkeypatch, **fields)

    linear = dict(rope_type="linear", factor=4.0)
    assert read() is read(rope__scaling__type="none") is None
    assert read(rope__scaling__type="linear") is None
    assert read(rope__scale_linear=4.0) == linear
    assert read(rope__scaling__factor=4.0) == linear
    assert read(rope__scaling__factor=4.0, rope__scale_linear=2.0) == linear
    assert read(rope__scaling__factor=1.0) is read(rope__scale_linear=0.0) is None
    assert read(rope__scaling__type="none", rope__scaling__factor=4.0) is None
    yarn = dict(rope__scaling__type="yarn", rope__scaling__factor=4.0)
    expected = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)
    assert read(**yarn) == expected
    expected["original_max_position_embeddings"] = 1024
    assert read(rope__scaling__original_context_length=1024, **yarn) == expected
    found = read(rope__scaling__attn_factor=2.0, rope__scaling__yarn_attn_factor=0.5)
    assert found is None
    more = read(rope__scaling__yarn_attn_factor=2.0, **yarn)["attention_factor"]
    assert more == pytest.approx(2 * (0.1 * np.log(4.0) + 1))
    with pytest.raises(
        ValueError, match=r"a\.gguf: rope.scaling.type 'other' is not supported"
    ):
        read(rope__scaling__type="other")
    factors = read(factors=[1.0, 8.0])["long_factor"]
    assert factors == [1.0, 8.0]
    scaled = read(factors=[1.0, 8.0], rope__scaling__factor=2.0)["long_factor"]
    assert scaled == [2.0, 16.0]
