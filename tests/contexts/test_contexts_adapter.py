"""Streamed text has whole characters, no stop text, and its end."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.contexts.inference.adapter import Finish, Written
from stoker.contexts.prompts import TokenText, token_text

END = 256


def decode(ids: Sequence[int]) -> str:
    """Decode tokens as bytes. An incomplete character becomes the replacement character, as in tokenizers."""
    return bytes(ids).decode("utf-8", "replace")


def write(
    text: str, *, stop: tuple[str, ...] = (), pieces: bool = True, most: int = 10_000
) -> tuple[list[str], Written]:
    written = Written(decode=decode, ends=frozenset({END}), most=most, stop=stop, pieces=pieces)
    found = []
    for token in (*text.encode(), END):
        found.append(written.add(token))
        if written.finish is not None:
            break
    return found, written


def test_characters_of_several_tokens_come_whole() -> None:
    found, written = write("aé€😀z")
    assert [piece for piece in found if piece] == ["a", "é", "€", "😀", "z"]
    assert written.finish is Finish.STOP


def test_without_pieces_the_text_comes_at_the_end() -> None:
    found, _ = write("hello", pieces=False)
    assert found == ["", "", "", "", "", "hello"]


def test_what_may_become_a_stop_text_is_held_back() -> None:
    found, written = write("one\n\ntwo", stop=("\n\n",))
    assert found == ["o", "n", "e", "", ""]
    assert written.finish is Finish.STOP
    found, written = write("one\nt", stop=("\n\n",))
    assert found == ["o", "n", "e", "", "\nt", ""]


def test_the_most_tokens_end_it_and_give_what_was_held_back() -> None:
    found, written = write("abc\n", stop=("\n\n",), most=4)
    assert found == ["a", "b", "c", "\n"]
    assert written.finish is Finish.LENGTH


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40), stop=st.lists(st.text(min_size=1, max_size=4), max_size=3), most=st.integers(1, 60))
def test_pieces_and_whole_are_the_same_text(text: str, stop: list[str], most: int) -> None:
    stops = tuple(stop)
    pieces, one = write(text, stop=stops, most=most)
    whole, other = write(text, stop=stops, pieces=False, most=most)
    assert "".join(pieces) == "".join(whole)
    assert one.finish is other.finish
    expected = decode(list(text.encode()[:most]))
    found = "".join(whole)
    assert expected.startswith(found)
    assert not any(each in found for each in stops)


LOST = "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("text", "piece", "raw"),
    [
        (LOST, "<0xE2>", b"\xe2"),  # a token of one byte in a vocabulary with byte fallback
        (LOST, "ðŁ", b"\xf0\x9f"),  # a token in a vocabulary of bytes, two bytes of a character
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
        ("Paris", "▁Paris", " Paris"),  # the piece has the space that the decoder drops
        (" Paris", "ĠParis", " Paris"),
        ("é", "Ã©", "é"),
        (LOST, "ï¿½", LOST),  # the text has the replacement character itself
        ("<s>", "<s>", "<s>"),
        (LOST, "日", LOST),  # a piece that stands for no bytes
    ],
)
def test_a_whole_text_is_a_text(text, piece, found):
    assert token_text(text, piece) == found
    assert type(token_text(text, piece)) is str
