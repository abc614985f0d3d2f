from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import write_tiny_model

from stoker.contexts.inference.adapter import FinishReason, GenerationRequest, ModelTexts, Sampling, WrittenText
from stoker.contexts.prompts import PromptReader, TokenText, token_text

END = 256
LOST = "\N{REPLACEMENT CHARACTER}"


def decode(ids: Sequence[int]) -> str:
    """Decode tokens as bytes. An incomplete character becomes the replacement character, as in tokenizers."""
    return bytes(ids).decode("utf-8", "replace")


def begun(
    decoded: Callable[[Sequence[int]], str], *, stop: tuple[str, ...] = (), pieces: bool = True, most: int = 100
) -> WrittenText:
    texts = ModelTexts(decode=decoded, ends=frozenset({END}), longest=0)
    return WrittenText(texts, GenerationRequest(1, (0,), Sampling(max_new_tokens=most, stop=stop), pieces=pieces))


def write(
    text: bytes, *, stop: tuple[str, ...] = (), pieces: bool = True, most: int = 10_000
) -> tuple[list[str], WrittenText]:
    written, found = begun(decode, stop=stop, pieces=pieces, most=most), []
    for token in (*text, END):
        found.append(written.add(token))
        if written.finish is not None:
            break
    return found, written


def of_bytes(ids: Sequence[int]) -> str:
    """Decode as a tokenizer with byte fallback does: each byte of an invalid run becomes a replacement character."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return LOST * len(ids)


@pytest.mark.parametrize("decoded", [decode, of_bytes], ids=["byte level", "byte fallback"])
def test_invalid_utf8_is_streamed_within_three_tokens(decoded: Callable[[Sequence[int]], str]) -> None:
    written = begun(decoded)
    pieces = [written.add(0xFF) for _ in range(20)]
    assert pieces == ["", "", "", *[LOST] * 17]
    assert "".join([*pieces, written.add(END)]) == LOST * 20


@pytest.mark.parametrize("decoded", [decode, of_bytes], ids=["byte level", "byte fallback"])
def test_characters_of_several_tokens_are_sent_whole(decoded: Callable[[Sequence[int]], str]) -> None:
    written = begun(decoded)
    pieces = [written.add(byte) for byte in "aé€😀é😀z".encode()]
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "😀", "é", "😀", "z"]


def test_characters_that_share_tokens_are_sent_whole() -> None:
    # Each third byte shares a token with the following byte.
    parts = [
        b"\xe2",
        b"\x82",
        *[b"\xac\xe2", b"\x82"] * 6,
        b"\xac",
    ]

    def joined(ids: Sequence[int]) -> str:
        return b"".join(parts[id] for id in ids).decode("utf-8", "replace")

    written = begun(joined)
    pieces = [written.add(token) for token in range(len(parts))]
    assert "".join(pieces) == "€" * 7
    assert LOST not in "".join(pieces[:-1])
    assert pieces[4], "a whole character does not wait for the text's last token"


def test_possible_start_of_a_stop_text_is_held_back() -> None:
    found, written = write(b"one\n\ntwo", stop=("\n\n",))
    assert found == ["o", "n", "e", "", ""]
    assert written.finish is FinishReason.STOP
    found, _ = write(b"one\nt", stop=("\n\n",))
    assert found == ["o", "n", "e", "", "\nt", ""]
    found, _ = write(b"one", pieces=False)
    assert found == ["", "", "", "one"]


def test_token_limit_ends_the_text_and_releases_held_text() -> None:
    found, written = write(b"abc\n", stop=("\n\n",), most=4)
    assert found == ["a", "b", "c", "\n"]
    assert written.finish is FinishReason.LENGTH


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(max_size=40).map(str.encode) | st.binary(max_size=40),
    stop=st.lists(st.text(min_size=1, max_size=4), max_size=3).map(tuple),
    most=st.integers(1, 60),
)
def test_streamed_pieces_join_to_the_whole_text(text: bytes, stop: tuple[str, ...], most: int) -> None:
    pieces, one = write(text, stop=stop, most=most)
    whole, other = write(text, stop=stop, pieces=False, most=most)
    found = "".join(whole)
    assert "".join(pieces) == found
    assert one.finish is other.finish
    if LOST not in decode(text):
        assert decode(text[:most]).startswith(found)
        assert not any(each in found for each in stop)


@pytest.mark.parametrize(
    ("text", "piece", "found", "raw"),
    [
        (LOST, "<0xE2>", LOST, b"\xe2"),  # one byte as a token in a vocabulary with byte fallback
        (LOST, "ðŁ", LOST, b"\xf0\x9f"),  # two bytes of a character as a token in a byte vocabulary
        (f" {LOST}", "ĠðŁ", f" {LOST}", b" \xf0\x9f"),
        ("Paris", "▁Paris", " Paris", None),  # the piece has the space that the decoder drops
        (" Paris", "ĠParis", " Paris", None),
        (LOST, "ï¿½", LOST, None),  # the text contains a real replacement character
        (LOST, "日", LOST, None),  # a piece that stands for no bytes
    ],
)
def test_incomplete_character_is_returned_with_its_bytes(text, piece, found, raw):
    made = token_text(text, piece)
    again = pickle.loads(pickle.dumps(made))
    assert type(made) is type(again) is (str if raw is None else TokenText)
    assert made == again == found
    assert getattr(again, "raw", None) == raw


@pytest.mark.slow
def test_tool_call_markers_stay_and_other_special_tokens_are_removed(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_tiny_model(tmp_path / "tiny")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tiny")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    text = "<|turn|>[TOOL_CALLS][]<|turn|>"
    for special in ([], ["[TOOL_CALLS]"]):
        tokenizer.add_tokens(special, special_tokens=True)
        reader = PromptReader(tokenizer, ends=frozenset(), longest=0)
        assert reader.decode(tokenizer(text)["input_ids"]) == "[TOOL_CALLS][]"
