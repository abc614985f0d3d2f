"""What Parsl's kernel asks before it tries a call again: what the failure costs, and until when the call has time."""

from __future__ import annotations

import math
from typing import Any

from stoker.errors import (
    CallCancelledError,
    CallDroppedError,
    NoDeviceError,
    PoisonCallError,
    SerializationError,
    StreamDiffersError,
)
from stoker.manager.executor.futures import CallFuture
from stoker.manager.executor.prepared import AppWants, TriedWants

_FINAL = (
    CallDroppedError, CallCancelledError, PoisonCallError, NoDeviceError, SerializationError, StreamDiffersError,
)  # fmt: skip


def retry_cost(error: Exception, task: dict[str, Any]) -> float:
    """What a failure costs of Parsl's retries. What the manager has decided for good is not tried again.

    `task` is the kernel's record of the call, which keeps the deadline of the first try from here on.
    """
    if isinstance(error, _FINAL):
        return math.inf
    sent, specification = task["exec_fu"], task["resource_specification"]
    if isinstance(sent, CallFuture) and sent.due_at is not None:
        if isinstance(specification, AppWants):
            again = task["resource_specification"] = AppWants(
                specification.wants,
                due_at=sent.due_at,
                function=specification.function,
                made_of=specification.made_of,
            )
            again.inbox = specification.inbox
        else:
            task["resource_specification"] = TriedWants(specification, due_at=sent.due_at)
    return 1.0
