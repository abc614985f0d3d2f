"""How a call's function and arguments are unpickled in a library, and how its result or exception is pickled.

A result that is too large for a message becomes a file in the session's folder of objects. A package that is missing
here, and what the disk refuses, is a `TransferError`, which has the failure that the call ends with. Any other
exception that unpickling raises comes from the user's code and keeps its type.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stoker.contexts import payloads
from stoker.contexts.recipe import ObjectRef
from stoker.errors import SerializationError
from stoker.pilot.library.functions import Function
from stoker.pilot.library.settings import Settings
from stoker.protocol.calls import INLINE_LIMIT_BYTES, Failure, FailureKind, Payload

_SMALL = frozenset({type(None), bool, int, float, str, bytes, tuple, list, dict, complex})
_TEXT_MOST = 40_000


class TransferError(Exception):
    """The function or arguments of a call could not be unpickled here, or its result could not be sent."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Packer:
    """Opens what calls bring, and packs what they give back. `settings`: where this library is."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def failure(self, message: str, *, kind: FailureKind = FailureKind.SERIALIZATION) -> Failure:
        """A failure that happened in this library."""
        return Failure(
            kind=kind,
            message=clean(message),
            pilot=self._settings.pilot,
            library=self._settings.library,
            log=self._settings.log,
        )

    @property
    def log(self) -> str:
        """The library's log."""
        return self._settings.log

    # ---- what a call brings

    def open_function(self, function: Function) -> tuple[Callable[..., Any], bool]:
        """The function, and whether it takes the context. Raises TransferError if a package that it imports is missing
        here, and what its own code raises."""
        try:
            return function.open()
        except BaseException as error:
            self._tell(error, f"the function {function.name} was")
            raise

    def open_arguments(
        self, function: Function, payload: Payload, objects: Mapping[str, str]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call. `objects`: where large arguments lie, by name. Raises TransferError if these cannot
        be read, or if a package that they import is missing here, and what their own code raises."""
        data: Any = payload
        if isinstance(data, ObjectRef):
            try:
                data = _map(objects.get(data.name) or data.source)
            except OSError as error:
                what = f"the arguments of {function.name} could not be read on {self._settings.pilot}"
                raise TransferError(self.failure(f"{what}: {type(error).__name__}: {error}")) from error
        try:
            args, kwargs = function.open_arguments(data)
        except BaseException as error:
            self._tell(error, f"the arguments of {function.name} were")
            raise
        return args, kwargs

    def _tell(self, error: BaseException, what_was: str) -> None:
        """Note on an exception that it was raised by unpickling. Raises TransferError instead of one that says that a
        package is missing or that the bytes are damaged."""
        what, pilot = what_was.rpartition(" ")[0], self._settings.pilot
        if isinstance(error, ImportError):
            text = (
                f"{what} could not be unpickled on {pilot}: {type(error).__name__}: {error}; what it imports must be"
                " installed there"
            )
            raise TransferError(self.failure(text)) from error
        if isinstance(error, SerializationError):
            raise TransferError(self.failure(f"{what} could not be unpickled on {pilot}: {error}")) from error
        with contextlib.suppress(Exception):  # a class of the user's may refuse it
            error.add_note(f"while {what_was} unpickled on {self._settings.pilot}")

    # ---- what it gives back

    def parts(self, value: Any, *, what: str) -> list[Any]:
        """A result or a piece of one (`what`), pickled. Raises TransferError."""
        try:
            if type(value) in _SMALL:
                return [payloads.dumps(value, what=what)]
            return payloads.dump_parts(value, what=what)
        except SerializationError as error:
            raise TransferError(self.failure(str(error))) from error
        except BaseException as error:
            text = f"the {what}, a {type(value).__name__}, could not be pickled: {type(error).__name__}: {error}"
            raise TransferError(self.failure(text)) from error

    def pack(self, call: int, result: Any) -> Payload:
        """The payload of a result. Raises TransferError."""
        parts = self.parts(result, what="result")
        if len(parts) == 1 and len(parts[0]) <= INLINE_LIMIT_BYTES:
            return parts[0] if type(parts[0]) is bytes else bytes(parts[0])
        if sum(map(len, parts)) <= INLINE_LIMIT_BYTES:
            return b"".join(parts)
        return self._store(call, parts)

    def pack_error(self, call: int, error: BaseException) -> Payload:
        """The payload of an exception; its frames are forgotten."""
        if error.__traceback__ is not None:  # from the user's own frame on
            error.__traceback__ = error.__traceback__.tb_next
        data = payloads.dump_exception(error)
        error.__traceback__ = None  # frames hold the arguments alive
        if len(data) <= INLINE_LIMIT_BYTES:
            return data
        try:
            return self._store(call, [data])
        except TransferError:
            return payloads.dump_exception(SerializationError(f"{type(error).__name__} of {len(data)} bytes was lost"))

    def _store(self, call: int, parts: list[Any]) -> ObjectRef:
        """Write a large result to a file of the session. Raises TransferError if the disk refuses it."""
        size = sum(map(len, parts))
        name = f"result-{call:x}-{uuid.uuid4().hex[:12]}"
        path = Path(self._settings.objects) / name
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
                for part in parts:
                    rest = memoryview(part)
                    while rest:
                        rest = rest[file.write(rest) :]
        except OSError as error:
            path.unlink(missing_ok=True)
            text = f"a result of {size} bytes could not be written to {path}: {error}; make room there and run it again"
            raise TransferError(self.failure(text)) from error
        return ObjectRef(name=name, size_bytes=size, source=str(path))


def _map(path: str) -> memoryview:
    """Map a file's bytes into memory. Writes change the mapping alone, and pages are read on first use."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(bytearray())
        return memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))


def clean(text: str) -> str:
    """Make a user's text fit for a frame: valid UTF-8, and its middle left out if it is long."""
    if len(text) > _TEXT_MOST:
        text = f"{text[: _TEXT_MOST // 2]} … {len(text) - _TEXT_MOST:,} characters … {text[-_TEXT_MOST // 2 :]}"
    return text.encode("utf-8", "replace").decode()
