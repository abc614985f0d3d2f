"""The text of one token, with its bytes if it is a part of a character: a character may take several tokens."""

from __future__ import annotations

import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte, in vocabularies that fall back to bytes."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""A space, in vocabularies of SentencePiece."""


class TokenText(str):
    """The text of a token whose bytes are part of a character. `raw`: these bytes."""

    __slots__ = ("raw",)
    raw: bytes

    def __new__(cls, text: str, raw: bytes) -> TokenText:
        """A text with its bytes."""
        made = super().__new__(cls, text)
        made.raw = raw
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenText, (str(self), self.raw)


def token_text(text: str, piece: str) -> str:
    """The text of a token; a TokenText for a part of a character. `text` is the token decoded alone, `piece` its name
    in the vocabulary."""
    if piece.startswith(_SPACE) and _SPACE not in text:  # a decoder drops the space that begins a text
        return piece.replace(_SPACE, " ")
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    raw = _bytes_of(piece)
    return text if raw is None or raw == text.encode() else TokenText(text, raw)


def _bytes_of(piece: str) -> bytes | None:
    """The bytes behind a token's name, or None."""
    if found := _BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    try:
        return bytes(_BYTE_LEVEL[character] for character in piece)
    except KeyError:
        return None


def _byte_level() -> dict[str, int]:
    """The character that stands for each byte in vocabularies of bytes (GPT-2, Llama 3, Qwen): itself if it can be
    printed, else one from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level()
