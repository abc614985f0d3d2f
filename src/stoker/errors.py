"""Every error for users of Stoker.

    StokerError
    ├── ConfigError             a site file or an option is wrong
    │   └── UnitError           a size or a duration is invalid
    ├── RecipeError             a context recipe cannot be made from its arguments
    ├── InputTooLongError       an input is longer than every runtime of its family
    ├── SerializationError      a function, argument, result or exception cannot be pickled
    ├── SessionError            the session cannot be started, found, joined or kept
    │   └── ProtocolError       a peer violates the protocol, or has another version or session
    └── CallError               a call ended without a result
        ├── ContextError        its context could not be loaded
        │   └── NoDeviceError   no device of this site can ever hold its context
        ├── PoisonCallError     it killed its library several times
        ├── CallTimeoutError    it ran longer than allowed
        ├── CallDroppedError    a policy dropped it
        ├── CallCancelledError  it was cancelled, or the session ended
        ├── StreamDiffersError  it ran again, and its pieces differ
        ├── GangBroken          ranks of its gang were lost several times
        ├── InfrastructureError devices, disks or networks failed it on several pilots
        └── RemoteCallError     its exception cannot be restored

Facts are attributes. Every error survives pickling. An exception of a user's function is raised unchanged, with the
remote traceback as its cause.
"""

from __future__ import annotations

from typing import Any


class StokerError(Exception):
    """Root of every error that Stoker raises.

    Args:
        message: What failed, where, and what to do.
        **facts: Values for programs, kept in `facts`. Each is also an attribute.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        try:
            return facts[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no fact {name!r}; it has {sorted(facts)}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.facts)


def _rebuild(kind: type[StokerError], message: str, facts: dict[str, Any]) -> StokerError:
    return kind(message, **facts)


class ConfigError(StokerError):
    """A site file or an option is wrong. Facts, if known: `file`, `line`, `key`."""


class UnitError(ConfigError, ValueError):
    """A size or a duration is invalid."""


class RecipeError(StokerError):
    """A context recipe cannot be made from its arguments."""


class InputTooLongError(StokerError, ValueError):
    """An input is longer than every runtime of its family accepts. Facts: `tokens`, `longest`."""


class SerializationError(StokerError):
    """An object cannot be pickled. Facts: `what` (function, argument, result, exception)."""


class SessionError(StokerError):
    """The session cannot be started, found, joined or kept. Facts, if known: `session`, `log`."""


class ProtocolError(SessionError):
    """A peer violates the protocol, or has another version or session."""


class CallError(StokerError):
    """A call ended without a result. Facts: `call`, and if known `pilot`, `library`, `log`."""


class ContextError(CallError):
    """The call's context could not be loaded. Facts: `context`, `pilot`, `log`."""


class NoDeviceError(ContextError):
    """No device of this site can ever hold the context. Facts: `context`, `needs`, `seen`."""


class PoisonCallError(CallError):
    """The call killed its library several times. Facts: `signal`, `tries`, `log`."""


class CallTimeoutError(CallError):
    """The call ran longer than allowed. Facts: `limit_s`."""


class CallDroppedError(CallError):
    """A policy dropped the call. Facts: `reason`, and `retry_after_s`, when a new try may succeed (0 = unknown)."""


class CallCancelledError(CallError):
    """The call was cancelled, or the session ended before it ran."""


class StreamDiffersError(CallError):
    """A streaming call ran again, and its pieces differ from the client's. Facts: `piece` (the first known difference,
    from 0), `handed_on`.
    """


class GangBroken(CallError):
    """Ranks of a gang were lost or did not join. This error restarts the call from rank 0's checkpoint. The client gets
    it only after several restarts.
    """


class InfrastructureError(CallError):
    """Devices, disks or networks failed the call on several pilots. The cause is the function's last exception. Facts:
    `device`, if devices failed.
    """


class RemoteCallError(CallError):
    """The call raised an exception that cannot be restored here. Facts: `kind`, `traceback`."""
