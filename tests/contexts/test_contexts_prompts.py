"""The text of one token, and the bytes of one that is part of a character."""

from __future__ import annotations

import pickle

import pytest

from stoker.contexts.prompts import TokenText, token_text

LOST = "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("text", "piece", "raw"),
    [
        (LOST, "<0xE2>", b"\xe2"),  # a vocabulary that falls back to bytes
        (LOST, "ðŁ", b"\xf0\x9f"),  # one of bytes
        (f" {LOST}", "ĠðŁ", b" \xf0\x9f"),
    ],
)
def test_a_part_of_a_character_has_its_bytes(text, piece, raw):
    found = token_text(text, piece)
    assert isinstance(found, TokenText)
    assert (found, found.raw) == (text, raw)
    again = pickle.loads(pickle.dumps(found))
    assert (type(again), again, again.raw) == (TokenText, text, raw)


@pytest.mark.parametrize(
    ("text", "piece", "found"),
    [
        ("Paris", "▁Paris", " Paris"),  # the space that a decoder drops
        (" Paris", "ĠParis", " Paris"),
        ("é", "Ã©", "é"),
        (LOST, "ï¿½", LOST),  # the character itself
        ("<s>", "<s>", "<s>"),
        (LOST, "日", LOST),  # a name that stands for no bytes
    ],
)
def test_a_whole_text_is_a_text(text, piece, found):
    assert token_text(text, piece) == found
    assert type(token_text(text, piece)) is str
