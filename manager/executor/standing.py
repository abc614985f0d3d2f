"""How a session stands, as far as its folder says: whether it stays, is up, is over, or cannot be reached.

Commands that only look import this and not `detached`, which starts sessions and takes twice as long to import.
"""

from __future__ import annotations

import msgspec

from stoker.decoding import UNREADABLE
from stoker.errors import SessionError
from stoker.manager.live import interfaces, lease, presence
from stoker.protocol.session import SessionFolder

JOINS = "STOKER_SESSION"
"""Names in the environment the session that programs join which name no site."""
RUN = "STOKER_RUN"
"""Names in the environment of a detached program (`stoker run --detach`) the folder of its run."""


class Launch(msgspec.Struct, frozen=True):
    """How a session's manager is started."""

    session: str
    options: tuple[str, ...]


def name_of(folder: SessionFolder) -> str:
    """The id of a session, also of one whose manager has not listened. Raises SessionError for a damaged one."""
    if folder.file.exists():
        return folder.read().session
    return read_launch(folder).session if folder.launch.exists() else folder.path.name


def is_detached(folder: SessionFolder) -> bool:
    """Whether the session outlives programs."""
    return folder.launch.exists()


def is_up(folder: SessionFolder) -> bool:
    """True if the session's manager is there and can be reached (`manager.live.presence`)."""
    return presence.is_up(folder)


def unreachable(folder: SessionFolder) -> str:
    """Why a manager that lives on this machine cannot be reached; empty if it lives elsewhere, or this machine's
    network is not at fault."""
    if not folder.file.exists():
        return ""
    file, holder = folder.read(), lease.read_if_whole(lease.lease_file(folder))
    if holder is None or not lease.is_alive(holder) or not (why := interfaces.no_way_to(file.address)):
        return ""
    return f"the manager of session {file.session} ({holder}) at {file.address} cannot be reached: {why}"


def over(folder: SessionFolder) -> str:
    """Why the session is over; empty while it is not, as far as its lease says."""
    return folder.over()


def unwritten(folder: SessionFolder) -> str:
    """Why the journal of a session that is over lacks its last records; empty if it does not."""
    return lease.unwritten(lease.lease_file(folder))


def read_launch(folder: SessionFolder) -> Launch:
    """How its manager is started. Raises SessionError for a session that does not outlive its program."""
    try:
        return msgspec.json.decode(folder.launch.read_bytes(), type=Launch)
    except OSError:
        raise SessionError(
            f"the session in {folder.path} belonged to a program and is over with it; `stoker up` starts one that stays"
        ) from None
    except UNREADABLE as error:
        raise SessionError(f"{folder.launch} is damaged: {error}") from error
