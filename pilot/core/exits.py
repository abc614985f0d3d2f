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

SAID_BY_CODE = {
    SOCKET_LOST: "lost its connection to the pilot: something in it closes files that are not its own",
    FOLDER_GONE: "found that its pilot's scratch folder is gone",
    NO_DESCRIPTORS: "had hardly any file descriptors left: calls in it leave files open",
    OTHER_MODULES: "got a function with other versions of modules that it had imported",
    RUINED: "can run no more calls: one of them emptied sys.modules, or lowered a limit for good",
    NOT_SETTLED: "could not open its log {log} or its folder; is that disk full?",
}
