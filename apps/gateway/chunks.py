"""The events of an answer that is streamed: OpenAI's chunks, as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from stoker.apps.common.openai.answers import chat_logprobs, completion_logprobs, token_usage
from stoker.apps.common.openai.request import ApiError, Endpoint
from stoker.apps.common.openai.writing import Likelihoods, TextBegun, TextEnded, TextPiece, TokenPiece

DONE = b"data: [DONE]\n\n"
_MARK = b"\x00"
"""No JSON text holds this byte."""
_encode = msgspec.json.encode


class Chunks:
    """The chunks of one answer. It counts what the choices have read and written: `tokens`."""

    def __init__(
        self, *, endpoint: Endpoint, name: str, model: str, created: int, per_prompt: int, usage: bool,
        continuous: bool = False,
    ) -> None:  # fmt: skip
        """`per_prompt`: choices of each prompt. `usage`: the last chunk says how many tokens there were; with
        `continuous` each chunk does."""
        is_chat = endpoint is Endpoint.CHAT
        self._is_chat = is_chat
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": None,
        }
        self._per_prompt = per_prompt
        self._usage = usage
        self._continuous = continuous
        self._offsets: dict[int, int] = {}
        self._plain: dict[int, tuple[bytes, bytes]] = {}
        """What stands before and behind the text in the event of a plain piece, by the choice's index."""
        self.read, self.written = 0, 0
        self._completed = 0
        """Tokens of the choices that have ended, as their ends have said."""

    @property
    def tokens(self) -> int:
        """Tokens read and written so far."""
        return self.read + self.written

    def events(self, index: int, pieces: Sequence[TextPiece]) -> bytes:
        """The events of some pieces of a choice; empty where none is due."""
        return b"".join([self._event_of(index, piece) for piece in pieces])

    def _event_of(self, index: int, piece: TextPiece) -> bytes:
        match piece:
            case str():
                self.written += 1
                if self._continuous:
                    return self._choice(index, text=piece)
                head, tail = self._plain.get(index) or self._plain_parts(index)
                return head + _encode(piece) + tail
            case TokenPiece():
                self.written += 1
                return self._choice(index, text=piece.text, likelihoods=piece.logprobs)
            case TextBegun():
                if index % self._per_prompt == 0:  # choices of one prompt have it in common
                    self.read += piece.prompt_tokens
                return self._choice(index, first=True) if self._is_chat else b""
            case TextEnded():
                self._completed += piece.completion_tokens
                return self._choice(index, finish=piece.finish_reason)

    def end(self) -> bytes:
        """The last events."""
        self.written = self._completed
        if not self._usage:
            return DONE
        last: dict[str, Any] = {**self._head, "choices": [], "usage": token_usage(self.read, self.written)}
        return _event(last) + DONE

    def _plain_parts(self, index: int) -> tuple[bytes, bytes]:
        """An event is the same for each plain piece but for the text: it is encoded once."""
        head, tail = self._choice(index, text=msgspec.Raw(_MARK)).split(_MARK)
        self._plain[index] = head, tail
        return head, tail

    def _choice(
        self, index: int, *, text: str | msgspec.Raw = "", likelihoods: Likelihoods | None = None, finish: str = "",
        first: bool = False,
    ) -> bytes:  # fmt: skip
        choice: dict[str, Any] = {"index": index}
        if self._is_chat:
            delta: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None} if first else {}
            choice["delta"] = delta if first or finish else {"content": text}
            choice["logprobs"] = chat_logprobs(likelihoods)
        else:
            offset = self._offsets.get(index, 0)
            choice["text"] = text
            choice["logprobs"] = completion_logprobs(likelihoods, offset=offset)
            if likelihoods:
                self._offsets[index] = offset + sum(len(token) for token, _, _ in likelihoods)
        choice["finish_reason"] = finish or None
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._usage:
            chunk["usage"] = token_usage(self.read, self.written) if self._continuous else None
        return _event(chunk)


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that could not go on."""
    return _event(error.body)


def comment(text: str) -> bytes:
    """What clients pass over, and what keeps connections open."""
    return f": {text}\n\n".encode()


def _event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"
