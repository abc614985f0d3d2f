"""All exceptions that Stoker raises for users.

    StokerError
    ├── ConfigError
    │   └── UnitError
    ├── RecipeError
    ├── InputTooLongError
    ├── SerializationError
    ├── SessionError
    │   └── ProtocolError
    └── CallError
        ├── ContextError
        │   └── NoDeviceError
        ├── PoisonCallError, CallTimeoutError, CallDroppedError, CallCancelledError
        ├── StreamDiffersError, GangBroken, InfrastructureError
        └── RemoteCallError

The facts of an error are attributes of the exception. Every error can be pickled. An exception of a user's function is
raised unchanged, with the remote traceback as its cause.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Self


class StokerError(Exception):
    """Base class of every exception that Stoker raises.

    Args:
        message: What failed, where, and advice.
        **facts: Values for programs. Each value is also an attribute.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    @classmethod
    def in_file(cls, file: str | os.PathLike[str], problem: str, *, line: int = 0, **facts: Any) -> Self:
        """Return an error about a file: `site.toml: line 3: …`.

        Args:
            file: The file; also a fact.
            problem: What is wrong, and advice.
            line: Line of the problem, from 1; also a fact. 0 if unknown.
            **facts: Further values for programs.
        """
        if line:
            facts["line"], problem = line, f"line {line}: {problem}"
        return cls(f"{os.fspath(file)}: {problem}", file=os.fspath(file), **facts)

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        try:
            return facts[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no fact {name!r}; it has {sorted(facts)}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self.facts), (str(self),)


class ConfigError(StokerError):
    """A site file or an option is wrong. Facts, if known: `file`, `line`, `key`."""


class UnitError(ConfigError, ValueError):
    """A size or a duration is invalid."""


class RecipeError(StokerError):
    """The arguments do not form a valid context recipe."""


class InputTooLongError(StokerError, ValueError):
    """An input is too long for every runtime of the context family. Facts: `tokens`, `longest`."""


class SerializationError(StokerError):
    """An object cannot be pickled. Facts: `what` (function, argument, result, exception)."""


class SessionError(StokerError):
    """The session cannot be started, found or joined, or it has ended. Facts, if known: `session`, `log`."""


class ProtocolError(SessionError):
    """A peer violates the protocol, or has another protocol version or session."""


class CallError(StokerError):
    """A call ended without a result. Facts: `call`, and if known `pilot`, `library`, `log`."""


class ContextError(CallError):
    """The context of the call could not be loaded. Facts: `context`, `pilot`, `log`."""


class NoDeviceError(ContextError):
    """No device of the site can hold the context. Facts: `context`, `needs`, `seen`."""


class PoisonCallError(CallError):
    """The call killed its library several times. Facts: `signal`, `tries`, `log`."""


class CallTimeoutError(CallError):
    """The call ran longer than allowed. Facts: `limit_s`."""


class CallDroppedError(CallError):
    """A policy dropped the call. Facts: `reason`, and `retry_after_s`, seconds before a useful retry (0: unknown)."""


class CallCancelledError(CallError):
    """The call was cancelled, or the session ended before it ran."""


class StreamDiffersError(CallError):
    """A streaming call ran again, and its pieces differ from those that the client already has.

    Facts: `piece` (index of the first different piece, from 0), `handed_on` (number of delivered pieces).
    """


class GangBroken(CallError):
    """Ranks of a gang were lost or did not join, even after several restarts from the checkpoint of rank 0."""


class InfrastructureError(CallError):
    """Devices, disks or networks made the call fail on several pilots. The cause is the function's last exception.

    Facts: `device`, if devices failed.
    """


class RemoteCallError(CallError):
    """The call raised an exception that this process cannot unpickle. Facts: `kind`, `traceback`."""
