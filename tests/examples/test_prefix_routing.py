"""Prefix-aware routing: hashes of the prefixes sent to each replica."""

import json

import pytest
from replicated.prefixes import PrefixTable, hash_beginnings, read_beginning

pytestmark = pytest.mark.one_end

PIECES = [letter * 64 for letter in "abcdef"]


def hash_pieces(letters):
    return hash_beginnings("".join(PIECES["abcdef".index(one)] for one in letters))


def read(**fields):
    return read_beginning(json.dumps(fields).encode())


def test_sequences_share_hashes_up_to_their_divergence():
    first, other = hash_pieces("abc"), hash_pieces("abd")
    assert first[:2] == other[:2] and first[2] != other[2]
    assert hash_pieces("ba")[1] != hash_pieces("aa")[1]  # hashes cover all before
    assert hash_beginnings("a" * 63) == () and len(hash_beginnings("a" * 129)) == 2


def test_the_table_counts_prefixes_sent_to_a_replica():
    table = PrefixTable(max_pieces=4)
    table.note("one", hash_pieces("abc"))
    assert table.count("one", hash_pieces("abcd")) == 3
    assert table.count("one", hash_pieces("abd")) == 2
    assert table.count("one", hash_pieces("bc")) == 0
    assert table.count("other", hash_pieces("abc")) == 0


def test_the_oldest_suffix_is_dropped_first():
    table = PrefixTable(max_pieces=4)
    for letters in ("abc", "d", "ab", "e"):  # the third renews "ab"
        table.note("one", hash_pieces(letters))
    assert table.count("one", hash_pieces("abc")) == 2
    assert table.count("one", hash_pieces("d")) == 1
    table.note("one", hash_pieces("f"))
    assert table.count("one", hash_pieces("d")) == 0
    assert table.count("one", hash_pieces("ab")) == 2


def test_lost_or_updated_replicas_are_dropped():
    table = PrefixTable(max_pieces=4)
    for name in ("one", "two", "three"):
        table.note(name, hash_pieces("ab"))
    table.keep_only(["one", "two", "four"])
    table.forget("two")
    counts = [table.count(name, hash_pieces("ab")) for name in ("one", "two", "three")]
    assert counts == [2, 0, 0]


def test_prompts_and_chats_are_hashed_from_their_start():
    system = {"role": "system", "content": "s" * 200}
    questions = [{"role": "user", "content": text} for text in ("why?", "how?")]
    chats = [read(messages=[system, question]) for question in questions]
    shared = hash_beginnings(chats[0])[:3]
    assert shared and shared == hash_beginnings(chats[1])[:3]
    assert hash_beginnings(read(messages=[system], tools=[{}]))[:3] != shared
    assert hash_beginnings(read(messages=[system], cache_salt="x"))[:3] != shared

    text = read(prompt="abc")
    assert text.endswith("abc") and read(prompt=["abc", "x"]) == text
    assert read(prompt=[1, 2]) == read(prompt=[[1, 2], [3]])
    assert read(prompt=[1, 2, 3]).startswith(read(prompt=[1, 2]))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 100_000, b"\xff", b"7"])
def test_unreadable_bodies_have_no_prefix(body):
    assert read_beginning(body) == ""
