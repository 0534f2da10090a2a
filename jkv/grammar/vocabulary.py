"""The bytes of each token of a vocabulary."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jkv.arguments import explains_arguments, explains_class


class Tokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that `vocabulary_of` uses."""

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        """Return the id of each token."""

    def to_str(self) -> str:
        """Return the tokenizer's file contents, JSON."""


@explains_class
@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """The bytes of each token, and the end tokens."""

    # Bytes of each id. Grammars never allow a token of None (special or unused ids)
    # or of no bytes.
    tokens: Sequence[bytes | None]
    # End-of-sequence ids; their entries in `tokens` are ignored.
    end_tokens: Sequence[int]
    # Called during compilation with the numbers of walked and of all states, since
    # large grammars take seconds.
    progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for missing or invalid end tokens."""
        ends = [int(token) for token in self.end_tokens]
        if not ends:
            raise ValueError(
                "end_tokens is empty; pass at least one end-of-sequence id"
            )
        if not all(0 <= token < len(self.tokens) for token in ends):
            raise ValueError(
                f"end_tokens must be ids from 0 to {len(self.tokens) - 1}, got {ends}"
            )
        object.__setattr__(self, "end_tokens", tuple(sorted(set(ends))))


@explains_arguments
def vocabulary_of(
    tokenizer: Tokenizer, end_tokens: Iterable[int], size: int | None = None
) -> Vocabulary:
    """Read the bytes of each token from a tokenizer.

    Supports the two common encodings: one character per byte (byte-level BPE, from
    GPT-2 on) and text with `▁` for a space and `<0x0A>` for single bytes
    (SentencePiece), with the decoder's further replacements. A token keeps its leading
    space, even if the decoder strips it from the beginning of a text.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
      end_tokens: end-of-sequence ids.
      size: width of the model's logits; ids from there on, such as image tokens of a
        text-only model, are left out. None keeps all.

    Returns:
      The vocabulary, up to the highest id or `size`. Special tokens are None.

    Raises:
      ValueError: the decoder is of another kind; construct a `Vocabulary` instead.
    """
    saved = json.loads(tokenizer.to_str())
    spell = _find_spelling(list(_parts_of_decoder(saved.get("decoder"))))
    vocabulary = tokenizer.get_vocab()
    tokens: list[bytes | None] = [None] * (max(vocabulary.values()) + 1)
    for text, number in vocabulary.items():
        tokens[number] = spell(text)
    # The decoder treats added tokens like others.
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
    """Return the function from a token to its bytes, as the decoder's parts apply."""
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
            # Decoders strip a space only at the beginning of a text.
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
        f"tokenizer has an unsupported decoder {what}; construct a Vocabulary from the "
        "bytes of each token"
    )


# The byte of each character of byte-level BPE: printable bytes are themselves, the
# others follow from U+0100 on (https://github.com/openai/gpt-2, `bytes_to_unicode`).
_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_SHIFTED = [byte for byte in range(256) if byte not in _PLAIN]
_BYTES = {chr(byte): byte for byte in _PLAIN}
_BYTES |= {chr(0x100 + rank): byte for rank, byte in enumerate(_SHIFTED)}


def _spell_byte_level(text: str) -> bytes:
    found = [_BYTES.get(character) for character in text]
    # A token with another character is added text, stored verbatim.
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
