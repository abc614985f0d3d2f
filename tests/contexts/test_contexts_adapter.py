"""Streamed text contains only whole characters, no stop text, and the complete end."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.contexts.inference.adapter import Finish, Written
from stoker.contexts.prompts import TokenText, token_text

END = 256
LOST = "\N{REPLACEMENT CHARACTER}"


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


def test_characters_of_several_tokens_are_sent_whole() -> None:
    found, written = write("aé€😀z")
    assert [piece for piece in found if piece] == ["a", "é", "€", "😀", "z"]
    assert written.finish is Finish.STOP


def of_bytes(ids: Sequence[int]) -> str:
    """Decode as a tokenizer with byte fallback does: each byte of an invalid run becomes a replacement character."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return LOST * len(ids)


@pytest.mark.parametrize("decoded", [decode, of_bytes], ids=["byte level", "byte fallback"])
def test_invalid_bytes_are_sent_within_three_tokens(decoded: Callable[[Sequence[int]], str]) -> None:
    written = Written(decode=decoded, ends=frozenset({END}), most=100, pieces=True)
    pieces = [written.add(0xFF) for _ in range(20)]
    assert pieces == ["", "", "", *[LOST] * 17]
    assert "".join([*pieces, written.add(END)]) == LOST * 20


@pytest.mark.parametrize("decoded", [decode, of_bytes], ids=["byte level", "byte fallback"])
def test_neighbouring_characters_of_several_tokens_are_sent_whole(decoded: Callable[[Sequence[int]], str]) -> None:
    written = Written(decode=decoded, ends=frozenset({END}), most=100, pieces=True)
    pieces = [written.add(byte) for byte in "€😀é😀".encode()]
    assert [piece for piece in pieces if piece] == ["€", "😀", "é", "😀"]


def test_characters_that_share_tokens_are_sent_whole() -> None:
    parts = [
        b"\xe2",
        b"\x82",
        *[b"\xac\xe2", b"\x82"] * 6,
        b"\xac",
    ]  # each third byte shares a token with the following byte

    def joined(ids: Sequence[int]) -> str:
        return b"".join(parts[id] for id in ids).decode("utf-8", "replace")

    written = Written(decode=joined, ends=frozenset({END}), most=100, pieces=True)
    pieces = [written.add(token) for token in range(len(parts))]
    assert "".join(pieces) == "€" * 7
    assert LOST not in "".join(pieces[:-1])
    assert pieces[4], "a whole character does not wait for the text's last token"


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=40), stop=st.lists(st.text(min_size=1, max_size=2), max_size=2))
def test_pieces_of_arbitrary_bytes_join_to_the_whole_text(data: bytes, stop: list[str]) -> None:
    found = []
    for pieces in (True, False):
        written = Written(decode=decode, ends=frozenset({END}), most=1000, stop=tuple(stop), pieces=pieces)
        given = []
        for token in (*data, END):
            given.append(written.add(token))
            if written.finish is not None:
                break
        found.append("".join(given))
    assert found[0] == found[1]


def test_text_without_pieces_is_sent_at_the_end() -> None:
    found, _ = write("hello", pieces=False)
    assert found == ["", "", "", "", "", "hello"]


def test_possible_start_of_a_stop_text_is_held_back() -> None:
    found, written = write("one\n\ntwo", stop=("\n\n",))
    assert found == ["o", "n", "e", "", ""]
    assert written.finish is Finish.STOP
    found, written = write("one\nt", stop=("\n\n",))
    assert found == ["o", "n", "e", "", "\nt", ""]


def test_token_limit_ends_the_text_and_releases_held_text() -> None:
    found, written = write("abc\n", stop=("\n\n",), most=4)
    assert found == ["a", "b", "c", "\n"]
    assert written.finish is Finish.LENGTH


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40), stop=st.lists(st.text(min_size=1, max_size=4), max_size=3), most=st.integers(1, 60))
def test_pieces_and_the_whole_text_are_equal(text: str, stop: list[str], most: int) -> None:
    stops = tuple(stop)
    pieces, one = write(text, stop=stops, most=most)
    whole, other = write(text, stop=stops, pieces=False, most=most)
    assert "".join(pieces) == "".join(whole)
    assert one.finish is other.finish
    expected = decode(list(text.encode()[:most]))
    found = "".join(whole)
    assert expected.startswith(found)
    assert not any(each in found for each in stops)


@pytest.mark.parametrize(
    ("text", "piece", "raw"),
    [
        (LOST, "<0xE2>", b"\xe2"),  # one byte as a token in a vocabulary with byte fallback
        (LOST, "ðŁ", b"\xf0\x9f"),  # two bytes of a character as a token in a byte vocabulary
        (f" {LOST}", "ĠðŁ", b" \xf0\x9f"),
    ],
)
def test_incomplete_character_is_returned_as_bytes(text, piece, raw):
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
        (LOST, "ï¿½", LOST),  # the text contains a real replacement character
        ("<s>", "<s>", "<s>"),
        (LOST, "日", LOST),  # a piece that stands for no bytes
    ],
)
def test_complete_text_is_a_string(text, piece, found):
    assert token_text(text, piece) == found
    assert type(token_text(text, piece)) is str
