"""The functions that a library holds: sent once, kept by key, the least recently used forgotten."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from stoker.contexts import payloads
from stoker.contexts.carried_modules import NO_MODULES, count_replaced
from stoker.contexts.code_payloads import loads_code, versions_carried
from stoker.contexts.payload_layout import Buffer
from stoker.protocol.to_pilot import FunctionBlob

_ROOM = 128
_ROOM_BYTES = 128_000_000


class Function:
    """One function. It is unpickled when its first call runs, in the thread that runs it."""

    def __init__(self, blob: FunctionBlob) -> None:
        self.name = blob.name
        self.size_bytes = len(blob.blob)
        self.mean_s = 0.0
        """How long its calls take, recent ones counting most; 0 = not known yet."""
        self._blob = blob.blob
        self._lock = threading.Lock()
        self._opened: tuple[Callable[..., Any], bool] | None = None
        self._modules = NO_MODULES
        self._versions: Mapping[str, str] | None = None
        self._replaced = 0
        """How often modules had been replaced when it was opened."""

    def versions(self) -> Mapping[str, str]:
        """The versions of the modules that it brings, by name. First asked for before it is opened."""
        if self._versions is None:
            self._versions = versions_carried(self._blob)
        return self._versions

    def open(self) -> tuple[Callable[..., Any], bool]:
        """The function, and whether it takes the context as its first argument; what it imports is found from now on.

        Raises whatever unpickling raises.
        """
        self._modules.enter()
        opened = self._opened
        if opened is None or self._replaced != count_replaced():
            with self._lock:  # several slots may get its first calls
                opened = self._opened
                if opened is None or self._replaced != count_replaced():  # its globals may hold a replaced module
                    (function, takes_context, *_), self._modules = loads_code(self._blob)
                    self._opened = opened = (function, takes_context)
                    self._replaced = count_replaced()
        return opened

    def open_arguments(self, data: Buffer) -> Any:
        """The value of a call's arguments; the function is open. What they import is found over what it imports."""
        if data[:1] != b"M":
            return payloads.loads(data)
        return loads_code(data, under=self._modules)[0]

    def took(self, seconds: float) -> None:
        """A call of it took this long."""
        self.mean_s = seconds if not self.mean_s else 0.7 * self.mean_s + 0.3 * seconds


class Functions:
    """A cache of at most `room` functions, and of at most `room_bytes` or one."""

    def __init__(self, *, room: int = _ROOM, room_bytes: int = _ROOM_BYTES) -> None:
        self._room = room
        self._room_bytes = room_bytes
        self._bytes = 0
        self._here: OrderedDict[str, Function] = OrderedDict()

    def find(self, key: str, blob: FunctionBlob | None) -> Function | None:
        """The function of this key, from the cache or from `blob`; None when it is in neither."""
        found = self._here.get(key)
        if found is None:
            if blob is None:
                return None
            found = self._here[key] = Function(blob)
            self._bytes += found.size_bytes
            while len(self._here) > self._room or (self._bytes > self._room_bytes and len(self._here) > 1):
                self._bytes -= self._here.popitem(last=False)[1].size_bytes
        else:
            self._here.move_to_end(key)
        return found
