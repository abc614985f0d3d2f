"""Checks before anything is sent that the protocol can carry a call, so that the error appears where the call is made.

A message is encoded long after the call was submitted, together with others. So this refuses values that the protocol
cannot carry (a number of a hundred digits, a folder whose name is no text) at submission.
"""

from __future__ import annotations

import msgspec

from stoker.errors import ConfigError, ProtocolError, SerializationError
from stoker.manager.executor.outgoing import Submission
from stoker.protocol import to_manager, wire
from stoker.protocol.bounds import MOST_DEFINED_BYTES, wrong_with
from stoker.protocol.calls import CallSpec, Features
from stoker.protocol.ids import CallId
from stoker.units import show_bytes

_decode = wire.from_client()


def check_submission(submission: Submission, features: Features | None, *, name: str, known: set[str]) -> None:
    """Raise ConfigError or SerializationError if calls of this submission cannot be sent; the error names the reason.

    `name` is the function's; `known` holds the keys of recipes that were checked before.
    """
    _check_size(len(submission.function.blob), f"{name} and what it uses of its surroundings", what="function")
    messages: list[msgspec.Struct] = [
        *(
            to_manager.DefineRecipe(recipe)
            for recipe in (submission.recipe, *submission.variants)
            if recipe.key not in known
        ),
        to_manager.DefineFunction(submission.function.key, submission.function.name, b"", submission.function.place),
        submission.message([CallSpec(CallId(0), b"", features)], now=submission.due_at or 0.0),
    ]
    for message in messages:
        try:
            data = wire.encode([message])
            wrong = wrong_with(_decode(data).messages[0])
        except (ProtocolError, UnicodeEncodeError, OverflowError, TypeError, ValueError) as error:
            wrong = _what(message) or str(error).partition(" - at `$")[0]  # a path on the wire is no user's word
        if wrong:
            raise ConfigError(f"{name} can't be called as it is asked for: {wrong}")
        if isinstance(message, to_manager.DefineRecipe):
            _check_size(len(data), f"context {message.recipe.name}, its loader and its arguments", what="context")
    known.update(recipe.key for recipe in (submission.recipe, *submission.variants))


def _check_size(size: int, whose: str, *, what: str) -> None:
    if size > MOST_DEFINED_BYTES:
        raise SerializationError(
            f"{whose} take {show_bytes(size)}, and at most {show_bytes(MOST_DEFINED_BYTES)} travel with a {what}: pass "
            "large values as arguments of the call, or read them in a context's loader from a file (its files=...)",
            what=what,
        )


def _what(message: msgspec.Struct) -> str:
    """The smallest part of a message that cannot be sent, with its value."""
    for field in msgspec.structs.fields(message):
        value = getattr(message, field.name)
        try:
            msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(value)), field.type)
        except (UnicodeEncodeError, OverflowError, TypeError, ValueError):
            parts = value if isinstance(value, list | tuple) else (value,)
            deeper = (_what(part) for part in parts if isinstance(part, msgspec.Struct))
            return next(filter(None, deeper), f"{field.name} is {value!r:.80}")
    return ""
