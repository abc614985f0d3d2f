"""The messages between manager and advisor: one a datagram, on a socket pair that keeps them apart."""

from __future__ import annotations

import msgspec

from stoker.manager.core.commands import AskAdvice
from stoker.manager.core.events import AdviceArrived
from stoker.manager.core.subjects import About

LONGEST_MESSAGE = 65_536
"""Longer ones are not sent."""


class Answer(msgspec.Struct, frozen=True):
    """The answer to the question on a subject; None: nothing was found."""

    about: About
    found: AdviceArrived | None


encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(AskAdvice).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
