"""What the tokens of a vocabulary spell: bytes, which is what grammars are made of."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jkv.arguments import explains_arguments, explains_class


class Tokenizer(Protocol):
    """A `tokenizers.Tokenizer`, as far as its vocabulary goes."""

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        """Return the id of each token."""

    def to_str(self) -> str:
        """Return the file that it would be saved as, JSON."""


@explains_class
@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """What each token spells, and which tokens end a text."""

    # Bytes of each id. A token of None (a special token, an id without a meaning) or of
    # no bytes is never allowed by a grammar.
    tokens: Sequence[bytes | None]
    # Ids that end a text. They spell nothing, whatever `tokens` says.
    end_tokens: Sequence[int]
    # Called while a grammar is made with the states that have been walked so far and
    # with all of them: large ones take seconds.
    progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for end tokens that are none or no ids."""
        ends = [int(token) for token in self.end_tokens]
        if not ends:
            raise ValueError("a vocabulary needs an end token: no text would ever stop")
        if not all(0 <= token < len(self.tokens) for token in ends):
            raise ValueError(
                f"end tokens {ends}: ids of the vocabulary are 0 to "
                f"{len(self.tokens) - 1}"
            )
        object.__setattr__(self, "end_tokens", tuple(sorted(set(ends))))


@explains_arguments
def vocabulary_of(
    tokenizer: Tokenizer, end_tokens: Iterable[int], size: int | None = None
) -> Vocabulary:
    """Read from a tokenizer what its tokens spell.

    Served are the two ways in which tokens spell bytes: a character for each byte
    (byte-level BPE, of GPT-2 and most models since) and text with `▁` for a space and
    `<0x0A>` for single bytes (of SentencePiece), and what else the decoder replaces. A
    leading space is kept as the token has it, also where a decoder would strip it from
    the beginning of a text.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
      end_tokens: ids that end a text.
      size: width of the model's logits; higher ids, which it cannot produce, are left
        out, such as tokens for images beside a model of text. None leaves none out.

    Returns:
      The vocabulary, as long as the highest id or `size`. Special tokens are None.

    Raises:
      ValueError: its decoder is of another kind; make a `Vocabulary` by hand.
    """
    saved = json.loads(tokenizer.to_str())
    spell = _find_spelling(list(_parts_of_decoder(saved.get("decoder"))))
    vocabulary = tokenizer.get_vocab()
    tokens: list[bytes | None] = [None] * (max(vocabulary.values()) + 1)
    for text, number in vocabulary.items():
        tokens[number] = spell(text)
    # A decoder takes added tokens for tokens like the others.
    for added in saved.get("added_tokens", ()):
        text = added["content"]
        tokens[added["id"]] = None if added["special"] else spell(text)
    tokens = tokens[:size]
    return Vocabulary(tokens, [end for end in end_tokens if end < len(tokens)])


def _parts_of_decoder(decoder: Any) -> Iterable[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _parts_of_decoder(part)
    else:
        yield decoder


def _find_spelling(parts: Sequence[Mapping[str, Any]]) -> Callable[[str], bytes]:
    """Return what spells a token, as the parts of a decoder do one after the other."""
    kinds = [part["type"] for part in parts]
    rules, is_fused = list[tuple[str, str]](), False
    for part in parts:
        match part["type"]:
            case "Replace":
                rules.append(_read_rule(part, is_fused))
            case "Metaspace":
                rules.append((part.get("replacement", "▁"), " "))
            case "Fuse":
                is_fused = True
            # A blank stripped from the beginning of a text stays with its token.
            case "Strip" if part.get("content") == " " and not part.get("stop"):
                continue
            case "ByteLevel" | "ByteFallback":
                continue
            case kind:
                raise _refuse(f"with a part {kind} ({kinds})")
    if "ByteLevel" in kinds and not rules:
        return _spell_byte_level
    if not rules and "ByteFallback" not in kinds or "ByteLevel" in kinds:
        raise _refuse(f"of {kinds}")
    return functools.partial(_spell_with_rules, rules, "ByteFallback" in kinds)


def _read_rule(part: Mapping[str, Any], is_fused: bool) -> tuple[str, str]:
    pattern = part["pattern"].get("String")
    if pattern is None:
        raise _refuse(f"that replaces a pattern, {part['pattern']}")
    if is_fused and len(pattern) != 1:
        raise _refuse(f"that replaces {pattern!r} where it may stand in two tokens")
    return pattern, part["content"]


def _refuse(what: str) -> ValueError:
    return ValueError(
        f"a decoder {what} is not known: make a Vocabulary from the bytes of each token"
    )


# The byte that each character of byte-level BPE stands for: bytes that print as they
# are for themselves, the others for the characters from U+0100 on
# (https://github.com/openai/gpt-2, `bytes_to_unicode`).
_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_SHIFTED = [byte for byte in range(256) if byte not in _PLAIN]
_BYTES = {chr(byte): byte for byte in _PLAIN}
_BYTES |= {chr(0x100 + rank): byte for rank, byte in enumerate(_SHIFTED)}


def _spell_byte_level(text: str) -> bytes:
    found = [_BYTES.get(character) for character in text]
    # A token with another character is added text, which stands for itself.
    return text.encode() if None in found else bytes(b for b in found if b is not None)


_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def _spell_with_rules(
    rules: Sequence[tuple[str, str]], has_bytes: bool, text: str
) -> bytes:
    if has_bytes and (byte := _BYTE.fullmatch(text)):
        return bytes.fromhex(byte[1])
    for pattern, content in rules:
        text = text.replace(pattern, content)
    return text.encode()
