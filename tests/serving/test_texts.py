"""Streaming detokenization: text is final, trimmed exactly, for any window size."""

import numpy as np
import pytest

from jkv.serving.request.texts import BROKEN, TextStream

pytestmark = pytest.mark.one_end

WORDS = ["a", "b", "ab", "ba", "\u00e9", " ", "\u732b", "abc"]
# A token is a byte, or a word in UTF-8.
PIECES = [word.encode() for word in WORDS] + [bytes([i]) for i in range(256)]


def decode(ids):
    return b"".join(PIECES[i] for i in ids).decode(errors="replace")


def draw_tokens(rng, count):
    """Draw words, and sometimes a character in single bytes, complete or not."""
    tokens = []
    while len(tokens) < count:
        if rng.random() < 0.7:
            tokens.append(int(rng.integers(len(WORDS))))
        else:
            whole = list("\u732b".encode())
            kept = whole if rng.random() < 0.8 else whole[:2]
            tokens += [len(WORDS) + byte for byte in kept]
    return tokens[:count]


def first_stop(tokens, stops):
    """Return the number of tokens up to a stop string, and the text before it."""
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count]).rstrip(BROKEN)
        places = [text.find(stop) for stop in stops]
        if any(place >= 0 for place in places):
            return count, text[: min(place for place in places if place >= 0)]
    return None, decode(tokens)


@pytest.mark.parametrize("seed", range(40))
def test_any_window_size_gives_the_same_text_and_end(seed):
    rng = np.random.default_rng(seed)
    tokens = draw_tokens(rng, int(rng.integers(1, 90)))
    prompt = draw_tokens(rng, 12)[: rng.integers(0, 12)]
    # A prompt that ends within a character leaves the rest to the completion.
    while decode(prompt).endswith(BROKEN):
        prompt.pop()
    stops = [
        "".join(rng.choice(WORDS, rng.integers(1, 4)))
        for _ in range(rng.integers(0, 3))
    ]
    count, text = first_stop(tokens, stops)
    for most in (1, 3, 8, 90):
        stream, start, shown, ended = TextStream(decode, prompt, stops), 0, "", None
        while start < len(tokens) and ended is None:
            stop = start + int(rng.integers(1, most + 1))
            is_last = stop >= len(tokens)
            ended = stream.advance(tokens[start:stop], has_ended=is_last)
            assert stream.text.startswith(shown) and text.startswith(stream.text)
            shown, start = stream.text, stop
        assert (ended, stream.text) == (count, text)


def decode_runs(ids):
    """Decode like tokenizers with byte fallback: a run of bytes is one string."""
    text, run = "", b""
    for i in [*ids, None]:
        if i is not None and i >= len(WORDS):
            run += PIECES[i]
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += BROKEN * len(run)
        text, run = text + ("" if i is None else WORDS[i]), b""
    return text


def as_bytes(text):
    return [len(WORDS) + byte for byte in text.encode()]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 36])
@pytest.mark.parametrize("length", [0, 1, 5, 30])
def test_characters_of_single_bytes_are_kept_whole(length, size):
    """For any prompt, also one that ends within a character, and any window size."""
    half = as_bytes("\u732b")[:2]
    prompt = [0, *as_bytes("\u3042" * length), *half]
    text = "\u732b" + "\u3042\u3044\u3046" * 12 + "a"
    tokens = as_bytes(text[:-1])[2:] + [WORDS.index("a")]
    stream = TextStream(decode_runs, prompt, [])
    for start in range(0, len(tokens), size):
        stop = start + size
        stream.advance(tokens[start:stop], has_ended=stop >= len(tokens))
    assert stream.text == text


def test_work_is_linear_in_the_text():
    counts = []

    def count(ids):
        counts.append(len(ids))
        return decode_runs(ids)

    tokens = as_bytes("\u3042" * 400)
    stream = TextStream(count, [], [])
    for token in tokens:
        stream.advance([token])
    assert stream.text == "\u3042" * 400 and sum(counts) < 50 * len(tokens)


BROKEN_RUNS = {
    "no first byte": [0x80],
    "half a character": [0xE2, 0x82],
    "two thirds of one": [0xF0, 0x9F, 0x98],
    "the character itself": [*BROKEN.encode()],
    "never UTF-8": [0xFF, 0xC0],
}


@pytest.mark.parametrize("size", [1, 3, 8, 800])
@pytest.mark.parametrize("of", [decode, decode_runs], ids=["byte level", "runs"])
@pytest.mark.parametrize("name", BROKEN_RUNS)
def test_work_is_bounded_for_invalid_bytes(name, of, size):
    """Invalid bytes are before valid text, within it, and alone."""
    run = [len(WORDS) + byte for byte in BROKEN_RUNS[name]] * 800
    run = run[:800]
    for prompt, tokens in (
        ([], run),
        ([], [0, *run, 1, 2]),
        (run, [0, 1, *[2] * 800]),
        ([0], [*run, *as_bytes("\u732b"), 0]),
    ):
        counts = []

        def count(ids, counts=counts):
            counts.append(len(ids))
            return of(ids)

        stream = TextStream(count, prompt, [])
        begun, counts[:] = sum(counts), []
        for start in range(0, len(tokens), size):
            before = stream.text
            stream.advance(tokens[start : start + size])
            assert stream.text.startswith(before)
        stream.advance([], has_ended=True)
        assert begun < 10_000 and sum(counts) < 80 * len(tokens)
        text = stream.text.removeprefix(BROKEN if len(prompt) == len(run) else "")
        if name == "the character itself" and of is decode_runs:
            # One replacement character for three bytes, or one per byte.
            assert text.replace(BROKEN, "") == of(tokens).replace(BROKEN, "")
        else:
            assert text == of(tokens)


@pytest.mark.parametrize("decode", [decode, decode_runs])
def test_streamed_text_equals_whole_decoding(decode):
    """A character U+FFFD is kept, and an incomplete character becomes one."""
    for tokens in (as_bytes("\ufffd"), [0, *as_bytes("\u3042\ufffd")]):
        stream = TextStream(decode, [], ["STOP"])
        for token in tokens:
            stream.advance([token])
        stream.advance([], has_ended=True)
        assert stream.text == decode(tokens)
    stream = TextStream(decode, [], [])
    for token in [0, *as_bytes("\u3042\u3044")[:-1]]:
        stream.advance([token])
    stream.advance([], has_ended=True)
    assert stream.text == "a\u3042" + BROKEN


def test_a_partial_stop_string_is_held_back():
    stream = TextStream(lambda ids: "".join(map(chr, ids)), [], ["STOP", "OPEN"])
    shown = []
    for character in "a STO, STOPEN":
        kept = stream.advance([ord(character)])
        shown.append(stream.text)
        if kept is not None:
            break
    assert shown[2:6] == ["a ", "a ", "a ", "a STO,"]
    assert (kept, stream.text) == (11, "a STO, ")


def test_words_decode_as_after_their_prompt():
    def decode_words(ids):
        """Decode like SentencePiece: the first word has no leading space."""
        return "".join(f" {i}" for i in ids)[1:]

    stream = TextStream(decode_words, [7, 8], [])
    for start in range(0, 60, 7):
        stream.advance(list(range(start, min(start + 7, 60))))
    assert stream.text == "".join(f" {i}" for i in range(60))
    alone = TextStream(decode_words, [], [])
    alone.advance([1, 2])
    assert alone.text == "1 2"
