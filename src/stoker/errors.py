"""Every error a user of Stoker can meet.

    StokerError
    ├── ConfigError             a site file or an option is wrong: names file, line, key and the nearest valid key
    │   └── UnitError           a size or a duration cannot be read
    ├── RecipeError             a context recipe cannot be made from its arguments
    ├── InputTooLongError       an input is longer than every runtime of its family: names both lengths
    ├── SerializationError      a function, argument, result or exception cannot be pickled: names which
    ├── SessionError            the session cannot be started, found, joined or kept
    │   └── ProtocolError       a peer said something that is not in the protocol, or of another version or session
    └── CallError               a call ended without a result
        ├── ContextError        its context could not be loaded: raised, hung, too large, died
        │   └── NoDeviceError   no device that this site has could ever hold it
        ├── PoisonCallError     it killed its library again and again
        ├── CallTimeoutError    it ran longer than it was allowed
        ├── CallDroppedError    a policy dropped it, with a reason
        ├── CallCancelledError  it was cancelled, or the session ended before it ran
        ├── StreamDiffersError  it ran again, and its pieces differ from the earlier ones
        ├── GangBroken          ranks of its gang were lost, again and again
        ├── InfrastructureError devices, disks or networks failed it, on one pilot after the other
        └── RemoteCallError     it raised something that cannot be brought back as itself

A message says what happened, where, and what to do. Facts are attributes, and every error survives pickling.
An exception raised by a user's own function comes back as itself, with the remote traceback as its cause.
"""

from __future__ import annotations

from typing import Any


class StokerError(Exception):
    """Root of every error that Stoker raises.

    Args:
        message: What failed, where, and what to do.
        **facts: Values for programs, kept in `facts`; each is also an attribute of the error.
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
    """A site file or an option is wrong. Facts: `file`, `line`, `key`, where known."""


class UnitError(ConfigError, ValueError):
    """A size or a duration cannot be read."""


class RecipeError(StokerError):
    """A context recipe cannot be made from its arguments."""


class InputTooLongError(StokerError, ValueError):
    """An input is longer than every runtime of its family. Facts: `tokens`, `longest`."""


class SerializationError(StokerError):
    """Something that must travel cannot be pickled. Facts: `what` (function, argument, result, exception)."""


class SessionError(StokerError):
    """The session cannot be started, found, joined or kept. Facts: `session`, `log`, where known."""


class ProtocolError(SessionError):
    """A peer violates the protocol, or has another version or session."""


class CallError(StokerError):
    """A call ended without a result. Facts: `call`, and where known `pilot`, `library`, `log`."""


class ContextError(CallError):
    """The call's context could not be loaded. Facts: `context`, `pilot`, `log`."""


class NoDeviceError(ContextError):
    """No device of this site can ever hold the context. Facts: `context`, `needs`, `seen`."""


class PoisonCallError(CallError):
    """The call killed its library several times. Facts: `signal`, `tries`, `log`."""


class CallTimeoutError(CallError):
    """The call ran longer than it was allowed. Facts: `limit_s`."""


class CallDroppedError(CallError):
    """A policy dropped the call. Facts: `reason`."""


class CallCancelledError(CallError):
    """The call was cancelled, or the session ended before it ran."""


class StreamDiffersError(CallError):
    """A call that streams its result ran again with pieces that differ from those the client already has. Facts:
    `piece` (the number of the first one known to differ, from 0), `handed_on`.
    """


class GangBroken(CallError):
    """Other ranks of a gang were lost, or did not come. Raised inside a call, it restarts the call from rank 0's
    checkpoint; the client sees it only after several restarts.
    """


class InfrastructureError(CallError):
    """Devices, disks or networks failed the call on several pilots. Its cause is the function's last exception. Facts:
    `device`, if devices failed.
    """


class RemoteCallError(CallError):
    """The call raised an exception that cannot be restored here. Facts: `kind`, `traceback`."""
