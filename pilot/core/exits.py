"""What a library's process says by its exit code."""

from __future__ import annotations

SOCKET_LOST = 117
"""It found its own socket closed by the code that it runs."""
FOLDER_GONE = 116
"""Its pilot has lost its scratch folder: what fails then is no fault of the call."""
NO_DESCRIPTORS = 115
"""Its calls have left so many files open that it can open no more."""
OTHER_MODULES = 113
"""It holds no context and got a function with other versions of modules that it had."""
RUINED = 114
"""A call has changed its interpreter or its limits for good."""
NOT_SETTLED = 118
"""It never became a library: its log or its folder could not be opened."""
DEVICE_FAILED = 119
"""Its device failed in a call: what is left of its process can use no device any more."""
NODE_FAILED = 120
"""Several calls in a row failed in it of what their node did to them."""

NOT_CLEARED = 121
"""It could not clear away what a call had left."""

OF_ITS_PILOT = frozenset({FOLDER_GONE, NOT_SETTLED, DEVICE_FAILED, NODE_FAILED})
"""What a library that loads ends with through no fault of its context."""
OF_THE_INFRASTRUCTURE = frozenset({DEVICE_FAILED, NODE_FAILED})
"""What a library that serves ends with through no fault of its calls."""

SAID_BY_CODE = {
    SOCKET_LOST: "lost its connection to the pilot: something in it closes files that are not its own",
    FOLDER_GONE: "found that its pilot's scratch folder is gone",
    NO_DESCRIPTORS: "had hardly any file descriptors left: calls in it leave files open",
    OTHER_MODULES: "got a function with other versions of modules that it had imported",
    RUINED: "can run no more calls: one of them emptied sys.modules, or lowered a limit for good",
    NOT_SETTLED: "could not open its log {log} or its folder; is that disk full?",
    DEVICE_FAILED: "ended because its device failed",
    NOT_CLEARED: "could not clear away what a call left; its log says why",
    NODE_FAILED: "ended because calls in it fail one after the other of what their node does to them",
}
