"""Convert texts to a language model's tokens and back. One character may consist of several tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from stoker.contexts import ambient
from stoker.contexts.inference.adapter import ModelTexts

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Names of one-byte tokens in vocabularies that split unknown characters into bytes."""
_PRINTED_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHER_BYTES = [byte for byte in range(0x100) if byte not in _PRINTED_BYTES]
_BYTE_BY_CHARACTER = {chr(byte): byte for byte in _PRINTED_BYTES} | {
    chr(0x100 + at): byte for at, byte in enumerate(_OTHER_BYTES)
}
"""Characters that represent bytes in byte-level vocabularies."""
_SPACE_CHARACTER = "\N{LOWER ONE EIGHTH BLOCK}"
"""Character that represents a space in SentencePiece vocabularies."""


class TokenText(str):
    """Text of a token that is only a part of a character. `raw`: bytes of the token."""

    __slots__ = ("raw",)
    raw: bytes

    def __new__(cls, text: str, raw: bytes) -> TokenText:
        made = super().__new__(cls, text)
        made.raw = raw
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenText, (str(self), self.raw)


def token_text(text: str, piece: str) -> str:
    """Return the text of a token: a TokenText for a part of a character. `piece`: the token's name."""
    if piece.startswith(_SPACE_CHARACTER) and _SPACE_CHARACTER not in text:  # the tokenizer's decoder dropped the space
        return piece.replace(_SPACE_CHARACTER, " ")
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    raw = _bytes_of_token(piece)
    return text if raw is None or raw == text.encode() else TokenText(text, raw)


def _bytes_of_token(piece: str) -> bytes | None:
    if found := _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(found[1], 16)])
    try:
        return bytes(_BYTE_BY_CHARACTER[character] for character in piece)
    except KeyError:
        return None


Ids = tuple[int, ...]

TEXTS_PER_TOKENIZER_CALL = 256
"""Number of texts per tokenizer call. Stop requests are checked between two calls."""


def max_positions(config: Any) -> int:
    """Return the maximum number of tokens that a Transformers model reads at once; 0 = unlimited."""
    return int(getattr(config, "max_position_embeddings", 0) or 0)


def refuse_one_text(texts: Any, *, what: str) -> None:
    if isinstance(texts, str):
        raise ValueError(f"{what}s must be a list of texts, not one text; write [{what}]")


def refuse_empty_rows(rows: Sequence[Ids], *, what: str) -> None:
    if () in rows:
        raise ValueError(f"{what} {rows.index(())} is empty; a model needs at least one token")


class PromptReader:
    """A tokenizer. `texts` holds the end tokens and limits of its model (see `ModelTexts`)."""

    def __init__(
        self, tokenizer: Any, *, ends: frozenset[int], longest: int, vocabulary: int = 0, grammars: Any = None
    ) -> None:
        self.tokenizer = tokenizer
        self._dropped = _special_tokens_to_drop(tokenizer)
        self.texts = ModelTexts(
            decode=self.decode, ends=ends, longest=longest, vocabulary=vocabulary, grammars=grammars
        )

    def encode_prompt(self, prompt: str | Sequence[int]) -> Ids:
        if isinstance(prompt, str):
            return self.encode_prompts([prompt])[0]
        if not isinstance(prompt, list | tuple) or not all(type(token) is int for token in prompt):
            raise ValueError(f"the prompt must be one text, or its token ids, not a {type(prompt).__name__}")
        if not prompt:
            raise ValueError("the prompt is empty; a model needs at least one token")
        return tuple(prompt)

    def encode_prompts(self, prompts: Sequence[str], *, prefix: str = "", batch_size: int = 0) -> list[Ids]:
        refuse_one_text(prompts, what="prompt")
        if batch_size < 0:
            raise ValueError(f"batch_size must be 1 or more, or 0 for any, not {batch_size}")
        rows = self.encode([prefix + prompt for prompt in prompts])
        refuse_empty_rows(rows, what="prompt")
        return rows

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[Ids]:
        """Return the token ids of each text. Add special tokens, unless all texts begin with the start token (BOS)."""
        if not texts:
            return []
        first = self.tokenizer.bos_token
        adds = special and not (first and all(text.startswith(first) for text in texts))
        stop, found = ambient.current_stop_request(), list[Ids]()
        for start in range(0, len(texts), TEXTS_PER_TOKENIZER_CALL):
            stop.raise_if_requested()
            some = self.tokenizer(list(texts[start : start + TEXTS_PER_TOKENIZER_CALL]), add_special_tokens=adds)[
                "input_ids"
            ]
            found += [tuple(ids) for ids in some]
        return found

    def decode(self, ids: list[int]) -> str:
        skips = self._dropped is None
        if self._dropped is not None:
            ids = [id for id in ids if id not in self._dropped]
        return str(self.tokenizer.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False))

    def token_text(self, token: int) -> str:
        return token_text(str(self.tokenizer.decode([token])), str(self.tokenizer.convert_ids_to_tokens(token)))

    def label_tokens(self, prompts: list[str], rows: list[Ids], labels: Sequence[str]) -> list[list[Ids]]:
        """Tokenize each prompt together with each label, and return the tokens that belong to the labels."""
        alone = [ids or (0,) for ids in self.encode(labels, special=False)]
        together = iter(self.encode([prompt + label for prompt in prompts for label in labels]))
        found: list[list[Ids]] = []
        for row in rows:
            wholes = [next(together) for _ in labels]
            found.append([
                whole[len(row) :] if len(whole) > len(row) and whole[: len(row)] == row else other
                for whole, other in zip(wholes, alone, strict=True)
            ])  # fmt: skip
        return found


_KEPT_SPECIAL_TOKENS = frozenset(
    {
        "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<think>", "</think>",
        "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>",
    }
)  # fmt: skip
"""Tokens to keep in a text even if the tokenizer marks them as special."""


def _special_tokens_to_drop(tokenizer: Any) -> frozenset[int] | None:
    """Return the special tokens to drop from a text; None to drop all special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {id: str(token) for id, token in added.items() if token.special}
    dropped = frozenset(id for id, text in special.items() if text not in _KEPT_SPECIAL_TOKENS)
    return dropped if len(dropped) < len(special) else None


def find_end_tokens(configured: int | Sequence[int] | None, tokenizer: Any) -> frozenset[int]:
    if configured is None:
        configured = tokenizer.eos_token_id
    return frozenset([configured] if isinstance(configured, int) else configured or ())
