"""How a manager comes back from its journal: the newest snapshot, the events since, and what to do where they are not
whole.

- A damaged record with whole ones behind it costs what it said: the core goes on with a hole (`RecordsLost`), and every
  peer is asked anew. The damaged file stays beside the journal by another name, and nothing more is written to it.
- Where the beginning cannot be read, or another version of Stoker decides otherwise than the one that wrote the
journal,
  the manager does not guess: it puts all files aside and begins anew with the ends that clients have not confirmed. Its
  peers say anew what they hold (`pilots`).

The commands that read a journal never change it; this does.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path

import msgspec

from stoker.manager.core.events import FromPilot, ManagerRestarted
from stoker.manager.core.reactor import Core
from stoker.manager.core.seams import Policies
from stoker.manager.live import segments
from stoker.manager.live.decisions import check_of
from stoker.manager.live.journal import MOST_CHECKS, JournalEnd
from stoker.manager.live.past import JournalPast
from stoker.manager.live.records import Decided, scan
from stoker.protocol.calls import CallEnd
from stoker.protocol.to_manager import CallsEnded
from stoker.units import show_bytes
from stoker.whole_files import draft_of, sync_folder

log = logging.getLogger("stoker.manager")


class CameBack(msgspec.Struct):
    """What a manager begins with. `core`: None where there was no journal, or it was put aside. `end`: where the
    journal goes on. `ends`: those that a new core is to know. `notices`: what people should be told. `compact`: write a
    snapshot soon. `lost`: bytes of the journal that were damaged."""

    core: Core | None = None
    end: JournalEnd | None = None
    ends: list[CallEnd] = []
    notices: list[str] = []
    snapshot_bytes: int = 0
    tail_bytes: int = 0
    compact: bool = False
    lost: int = 0


class _DecidesOtherwise(Exception):
    """A replay decides otherwise than the manager that wrote the journal."""


def come_back(journal: Path, session: str, policies: Policies) -> CameBack:
    """The core as it was after the journal's last event. Raises SessionError for a file that is no journal."""
    for path in segments.leftovers(journal):
        path.unlink(missing_ok=True)
    if not segments.exists(journal):
        return CameBack()
    past = JournalPast(journal, policies=policies)
    if not past.is_whole:
        why = next(iter(past.unreadable.values()), "the snapshot that belongs before it is not there")
        return _begin_anew(past, f"the journal does not tell how the session began ({why})")
    notices: list[str] = []
    try:
        core = _replayed(past, session, policies, notices)
    except _DecidesOtherwise as error:
        return _begin_anew(past, str(error))
    head = past.head or segments.new_head()
    notices += _keep_damaged(past)
    if journal.exists():
        end = JournalEnd(head, past.events, past.whole)
    else:  # a manager was killed between an old segment and a new one
        end = JournalEnd(segments.new_head(head.number + 1, first=past.events), past.events, 0)
    if past.core is not None:
        for path in segments.older(journal, past.first_segment):
            path.unlink(missing_ok=True)
    notices += [f"{path.name}: this snapshot cannot be read ({why})" for path, why in past.unreadable.items()]
    return CameBack(
        core,
        end,
        notices=notices,
        snapshot_bytes=past.snapshot_bytes,
        tail_bytes=past.bytes_read,
        compact=bool(past.damage) or head.stoker != segments.WRITER,
        lost=past.lost,
    )


def _replayed(past: JournalPast, session: str, policies: Policies, notices: list[str]) -> Core | None:
    """Give the events to the core, and compare its decisions with those that were made. Of a difference for which this
    very version is to blame people are told; the manager goes on with what it decides now."""
    core = past.core
    made: dict[int, int] = {}
    for now, record in past.records():
        if isinstance(record, Decided):
            if past.is_comparable and not notices:
                notices += _compare(past, record, made)
            made.clear()
            continue
        number = past.events - 1
        if core is None:
            core = Core(session, policies, now=now)
            core.start()
        try:
            check = check_of(core.handle(record, now))
        except Exception as error:
            log.exception("event %d of the journal cannot be replayed", number)
            raise _DecidesOtherwise(
                f"event {number:,} of the journal cannot be replayed ({type(error).__name__}: {error})"
            ) from error
        if isinstance(record, ManagerRestarted):
            made.clear()
        if len(made) < MOST_CHECKS:
            made[number] = check
    return core


def _compare(past: JournalPast, record: Decided, made: dict[int, int]) -> list[str]:
    for number, check in record.numbered():
        if made.get(number, check) == check:
            continue
        by = past.head.stoker if past.head is not None else ""
        where = f"event {number:,} of the journal"
        if by != segments.WRITER:
            raise _DecidesOtherwise(
                f"Stoker {segments.WRITER} decides otherwise about {where} than Stoker {by or 'of before'}, which wrote"
                " it"
            )
        text = f"a replay decides otherwise about {where} than the manager did: please report it, with the journal"
        log.error("%s", text)
        return [text]
    return []


def _keep_damaged(past: JournalPast) -> list[str]:
    """Keep each damaged file, and begin another segment behind it; what to tell people."""
    notices, copies = [], set[Path]()
    for place in past.damage:
        damage, path = place.damage, place.path
        if damage.cut:
            log.info("%s: the last %d bytes are a record that was not written to its end", path, damage.length)
            continue
        kept = past.journal.with_name(f"{past.journal.name}.damaged-{past.head_number(path):06d}-{damage.at}")
        copies.add(kept)
        text = f"{show_bytes(damage.length)} of the journal were damaged and are lost ({damage.why})"
        if not kept.exists():
            why = _keep(path, kept)
            ending = f"could not be kept: {why}" if why else f"is kept as {kept.name}"
            notices.append(f"{text}; the damaged file {ending}")
        log.error("%s, at byte %d: %s", path, damage.at, notices[-1] if notices else text)
    if past.head is not None and any(place.path == past.journal and not place.damage.cut for place in past.damage):
        os.truncate(past.journal, past.whole)
        past.journal.rename(segments.kept_path(past.journal, past.head.number))
        sync_folder(past.journal.parent)
    segments.remove_old_kept(past.journal, needed=copies)
    return notices


def _keep(path: Path, name: Path) -> str:
    """Give a file another name; where the file system has no hard links, copy it. Why that cannot be, or nothing."""
    try:
        name.hardlink_to(path)
        return ""
    except OSError as error:
        log.info("%s gets no second name (%s): it is copied", path, error.strerror)
    try:
        with draft_of(name, draft=name.with_name(f"{name.name}.draft")) as draft:
            shutil.copyfile(path, draft)
            draft.chmod(0o600)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _begin_anew(past: JournalPast, why: str) -> CameBack:
    """Put everything aside, and begin with the ends that clients have not confirmed."""
    ends = {end.call: end for client in past.certain.clients for end in client.ends}
    for path in segments.everything(past.journal):
        if path.suffix != ".snapshot":
            ends.update({end.call: end for end in _good_ends(path)})
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for path in segments.everything(past.journal):
        name = path.name.removeprefix(past.journal.name)
        path.rename(path.with_name(f"{past.journal.name}.aside-{stamp}{name.replace('.', '-')}"))
    segments.remove_old_kept(past.journal)
    kept = f"its files are kept as {past.journal.name}.aside-{stamp}*"
    notice = f"{why}: {kept}, and clients and pilots say anew what they hold"
    log.error("%s", notice)
    return CameBack(ends=list(ends.values()), notices=[notice])


def _good_ends(path: Path) -> list[CallEnd]:
    """Results in a segment: what a call's function returned holds whatever came of the rest."""
    return [
        end
        for _, _, record in scan(path)
        if isinstance(record, FromPilot)
        for message in record.messages
        if isinstance(message, CallsEnded)
        for end in message.ends
        if end.ok
    ]
