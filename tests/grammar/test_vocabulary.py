"""Token spellings of both supported kinds of tokenizers."""

import pytest
from support.grammar.grammar_reading import HostGrammar

from jkv.grammar import from_regex, vocabulary_of

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import decoders, models, pre_tokenizers  # noqa: E402

pytestmark = pytest.mark.one_end

END = "</s>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "a", "b", "▁a", "▁b", "▁ab", "ab", "▁▁", "é", "▁é", "<0x0A", "<0xG0>"]
FALLBACK = {"byte_fallback": True, "unk_token": "<unk>"}


def unigram():
    scores = [("<unk>", 0.0), (END, 0.0), *((byte, -20.0) for byte in BYTES)]
    scores += [(word, -float(len(word))) for word in WORDS]
    made = tokenizers.Tokenizer(models.Unigram(scores, 0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return made


def merged():
    """BPE like Llama 2: `▁` by a normalizer, byte fallback."""
    names = ["<unk>", END, *BYTES, *WORDS]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab"), ("▁", "▁"), ("▁", "é")]
    model = models.BPE(
        {name: number for number, name in enumerate(names)}, merges, **FALLBACK
    )
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Sequence(
        [
            tokenizers.normalizers.Prepend("▁"),
            tokenizers.normalizers.Replace(" ", "▁"),
        ]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def with_added(tokenizer):
    """Add special tokens, and one that is literal text."""
    tokenizer.add_special_tokens(["<unk>", END])
    tokenizer.add_tokens(["▁<0x0A>"])
    return tokenizer


@pytest.mark.parametrize("make", [unigram, merged])
def test_sentencepiece_tokens_spell_bytes(make):
    tokenizer = with_added(make())
    end, added = tokenizer.token_to_id(END), tokenizer.token_to_id("▁<0x0A>")
    vocabulary = vocabulary_of(tokenizer, [end])
    tokens = vocabulary.tokens
    assert tokens[tokenizer.token_to_id("<unk>")] is None and tokens[end] is None
    for byte, name in enumerate(BYTES):
        assert tokens[tokenizer.token_to_id(name)] == bytes([byte])
    spelled = [b" ", b"a", b"b", b" a", b" b", b" ab", b"ab", b"  "]
    spelled += ["é".encode(), " é".encode(), b"<0x0A", b"<0xG0>"]
    assert [tokens[tokenizer.token_to_id(word)] for word in WORDS] == spelled
    # An added token is decoded like others; it is too long for a byte token.
    assert tokens[added] == b" <0x0A>"
    # A token's spelling equals its decoding, except for the first space.
    for text in ("ab a", "a\nb é", "é€ ab", "b  b"):
        ids = tokenizer.encode(text).ids
        found = b"".join(tokens[token] for token in ids).decode()
        assert found == " " + text and tokenizer.decode(ids) == text


@pytest.mark.parametrize("make", [unigram, merged])
def test_grammars_accept_bytes_and_leading_spaces(make):
    tokenizer = make()
    end = tokenizer.token_to_id(END)
    vocabulary = vocabulary_of(tokenizer, [end])
    grammar = HostGrammar(from_regex(" ?(ab|é)\n a", vocabulary))

    def names_after(*names):
        state = grammar.follow(map(tokenizer.token_to_id, names))
        return {tokenizer.id_to_token(token) for token in grammar.allowed(state)}

    first = {"a", "ab", "é", "<0x61>", "<0xC3>"}
    assert names_after() == first | {"▁", "▁a", "▁ab", "▁é", "<0x20>"}
    assert names_after("▁") == names_after("<0x20>") == first
    assert names_after("▁", "<0xC3>") == {"<0xA9>"}
    assert names_after("ab") == names_after("▁é") == {"<0x0A>"}
    assert names_after("ab", "<0x0A>") == {"▁", "▁a", "<0x20>"}
    assert names_after("<0xC3>", "<0xA9>", "<0x0A>", "▁a") == {END}


def with_decoder(*parts, added=()):
    made = tokenizers.Tokenizer(models.BPE({"a": 0, "Ġ": 1, "_b": 2}, []))
    made.decoder = decoders.Sequence([*parts])
    made.add_tokens([*added])
    return made


def test_tokens_are_spelled_like_their_decoding():
    level = with_decoder(decoders.ByteLevel(), added=["  ", "Ġx", "日"])
    assert vocabulary_of(level, [0]).tokens[1:] == [
        *(b" ", b"_b", b"  ", b" x", "日".encode())
    ]
    parts = decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()
    blanks = with_decoder(*parts, added=["__"])
    assert vocabulary_of(blanks, [0]).tokens[2:] == [b" b", b"  "]
    for made in (level, blanks):
        tokens = vocabulary_of(made, [0]).tokens
        for number in range(1, len(tokens)):
            assert made.decode([0, number, 0]) == f"a{tokens[number].decode()}a"


def test_byte_tokens_need_a_decoder_with_fallback():
    """Other decoders keep the same spelling as text."""
    parts = [decoders.Replace("_", " ")]
    for added, spelled in (([], b"<0x0A>"), ([decoders.ByteFallback()], b"\n")):
        made = with_decoder(*parts, *added, added=["<0x0A>"])
        (token,) = made.encode("<0x0A>").ids
        assert vocabulary_of(made, [0]).tokens[token] == spelled
        assert made.decode([token]) == spelled.decode()


def test_tokens_the_model_cannot_produce_are_excluded():
    made = with_decoder(decoders.ByteLevel(), added=["x", "<image>"])
    assert vocabulary_of(made, [0, 4], size=4).tokens == [b"a", b" ", b"_b", b"x"]
    assert vocabulary_of(made, [0, 4], size=4).end_tokens == (0,)
    assert vocabulary_of(made, [0], size=9).tokens[3:] == [b"x", b"<image>"]
    with pytest.raises(ValueError, match="end_tokens is empty"):
        vocabulary_of(made, [4], size=4)


@pytest.mark.parametrize(
    "parts, word",
    [
        (
            [decoders.Fuse(), decoders.Replace("__", " ")],
            "'__' where it may stand in two",
        ),
        ([decoders.Replace(tokenizers.Regex("_+"), " ")], "replaces a pattern"),
        ([decoders.ByteLevel(), decoders.Replace("a", "b")], "ByteLevel"),
        ([decoders.ByteFallback(), decoders.Strip("x", 1, 0)], "Strip"),
        ([decoders.Fuse()], "Fuse"),
    ],
)
def test_decoders_that_change_more_than_tokens_are_refused(parts, word):
    with pytest.raises(ValueError, match=word):
        vocabulary_of(with_decoder(*parts), [0])


def test_decoders_of_other_kinds_are_refused():
    made = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}))
    made.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        vocabulary_of(made, [1])
