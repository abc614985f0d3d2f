"""The factory's interface to HTCondor's own commands.

`condor_q -json` lists the session's jobs, and `condor_history` lists the jobs that left the queue. `condor_submit` only
warns about an unknown setting, so the reason of a waiting job repeats the warning. If a job matches no slot,
`condor_q -better-analyze` runs every 5 minutes.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from stoker.manager.factory import condor_ads, condor_description
from stoker.manager.factory.allowed_nodes import placed
from stoker.manager.factory.batch import BatchJobStatus, BatchTrouble, SubmissionRefused, Unanswered, job_name
from stoker.manager.factory.commands import CommandResult, CommandRunner, in_chunks, last_lines
from stoker.manager.factory.condor_ads import Ad, JobStatus
from stoker.manager.factory.pacing import Listing, Pacer
from stoker.protocol.blocks import ANYWHERE, AllowedNodes, BlockPhase
from stoker.protocol.ids import BlockId
from stoker.site import Site

log = logging.getLogger("stoker.factory")

_ANALYZE_EVERY_S = 300.0
_ANALYZE_AGAIN_S = 60.0
"""Seconds after which an analysis that gave no result is repeated."""
_UNSEEN_S = 180.0
"""Seconds that a job waits without a negotiation cycle before the reason for its wait mentions the delay."""
_NO_NEGOTIATOR = "the pool has no negotiator at the moment, so no job starts"
_GONE_FROM_QUEUE = BatchJobStatus(
    BlockPhase.ENDED, "gone from the queue, and condor_history does not list the job", absent=True
)
_ID = re.compile(r"^(\d+)\.(\d+) - \d+\.\d+\s*$", re.MULTILINE)
_WARNING = re.compile(r"^WARNING: (?!Committed job submission )(?:QMGMT:\d+:)?(.*)$", re.MULTILINE)
_NOT_NOW = re.compile(
    r"can't find address|unable to locate|failed to (connect|fetch|begin|end|commit|send|create new)|couldn't contact"
    r"|CEDAR:6\d{3}|SECMAN:2\d{3}|timed out"
    r"|connection (closed|refused)|communication error|unknown error code|MAX_JOBS_(SUBMITTED|PER_OWNER)"
    r"|try again",
    re.IGNORECASE,
)
"""Temporary errors of condor_submit: the same job may be submitted later."""
_ADDRESS = re.compile(r"(?<=\d)\?[^>\s]*>")
"""The part of an address from `?`, which is cut off: `<127.0.0.1:9618?addrs=127.0.0.1-9618&alias=submit.pool>`."""
_GONE = re.compile(r"^(Job \S+ (not found|already marked for removal|not in `X' state.*)|Couldn't find/remove .*)$")


class CondorBatch:
    """HTCondor as a batch system. `files` and the block's key are transferred with each job."""

    def __init__(
        self,
        site: Site,
        *,
        session: str,
        folder: Path,
        command: Callable[[BlockId], str],
        files: Sequence[Path] = (),
        key: Callable[[BlockId], Path] | None = None,
        held_s: float = condor_ads.HELD_S,
        pacer: Pacer | None = None,
    ) -> None:
        self._site = site
        self._session = session
        self._folder = folder
        self._command = command
        self._files = [os.path.relpath(file, folder) for file in files]
        self._key = key
        self._held_s = held_s
        self._commands = CommandRunner(limit_s=site.provider.command_limit_s, folder=folder, pacer=pacer)
        self._listing: Listing[dict[str, Ad]] = self._commands.pacer.listing
        self._warned: dict[str, str] = {}
        self._ran: set[str] = set()
        self._has_history = True
        self._analyze_at, self._analysis, self._analyzed = -math.inf, "", ""
        self._negotiator_at, self._negotiator = -math.inf, ""

    def submit(self, block: BlockId, allowed: AllowedNodes = ANYWHERE) -> str:
        name, site = job_name(self._session, block), placed(self._site, allowed)
        script = condor_description.script(site, command=self._command(block))
        keys = [os.path.relpath(self._key(block), self._folder)] if self._key is not None else []
        text = condor_description.describe(site, session=self._session, block=block, files=[*self._files, *keys])
        for suffix, content in (("sub", text), ("sh", script)):
            (self._folder / f"{name}.{suffix}").write_text(content, errors="surrogateescape")
        (self._folder / f"{name}.sh").chmod(0o700)
        self._listing.forget()
        said = self._commands.run(["condor_submit", "-terse", f"{name}.sub"])
        self._listing.forget()
        if said.code:
            raise failure(in_short(said))
        found = _ID.search(said.out)
        if not found:
            raise Unanswered(f"condor_submit printed no job id: {in_short(said)}")
        job = f"{found[1]}.{found[2]}"
        if warned := warnings(said.err):
            words = f"condor_submit warned: {'; '.join(warned)}"
            if words not in self._warned.values():
                log.warning("block %s: %s", block, words)
            self._warned[job] = words
        return job

    def query(self, jobs: Sequence[str]) -> Mapping[str, BatchJobStatus]:
        """Return the states of jobs. Remove jobs that HTCondor holds permanently."""
        queued = self._queue()
        judge = partial(condor_ads.judge, held_s=self._held_s, memory_bytes=self._site.provider.memory_bytes)
        verdicts = {job: judge(queued[job], ran=job in self._ran) for job in jobs if job in queued}
        self._ran |= {job for job in verdicts if queued[job].get("JobStatus") == JobStatus.RUNNING}
        hopeless = {job: verdict.force for job, verdict in verdicts.items() if verdict.remove}
        for force in (False, True):
            self._remove([job for job in hopeless if hopeless[job] is force], force=force)
        unmatched = [job for job in verdicts if condor_ads.has_no_matching_slot(queued[job])]
        if unmatched and time.monotonic() > self._analyze_at:
            self._analyze_job_match(unmatched[0])
        unseen = any(condor_ads.is_unseen_by_negotiator(queued[job], for_s=_UNSEEN_S) for job in verdicts)
        if not unseen:
            self._negotiator_at, self._negotiator = -math.inf, ""
        elif not unmatched and time.monotonic() > self._negotiator_at:
            self._check_for_negotiator()
        statuses = {job: self._add_reason_details(verdict.status, queued[job]) for job, verdict in verdicts.items()}
        self._add_warnings(statuses)
        return statuses | self._ends_from_history([job for job in jobs if job not in queued])

    def cancel(self, jobs: Sequence[str]) -> None:
        for said in self._condor_rm(jobs):
            wrong = [line for line in said.err.splitlines() if line.strip() and not _GONE.match(line.strip())]
            if said.code and wrong:
                raise BatchTrouble(f"condor_rm: {in_short(said)}")

    def find(self) -> Mapping[str, BlockId]:
        # HTCondor lists a removed job until the job's machine answers.
        return {
            job: BlockId(str(ad[condor_description.BLOCK]))
            for job, ad in self._queue().items()
            if condor_description.BLOCK in ad and ad.get("JobStatus") != JobStatus.COMPLETED
        }

    def _queue(self) -> dict[str, Ad]:
        words = ["condor_q", *_JSON, "-constraint", condor_description.of_session(self._session)]
        ads = self._listing.read(lambda: self._read_ads(words))
        return {job: ad for job, ad in ads.items() if ad.get(condor_description.SOURCE) == self._site.name}

    def _ends_from_history(self, jobs: Sequence[str]) -> dict[str, BatchJobStatus]:
        ends = dict.fromkeys(jobs, _GONE_FROM_QUEUE)
        for some in in_chunks(jobs) if self._has_history else ():
            try:
                ads = self._read_ads(["condor_history", *_JSON, "-limit", str(len(some)), *some])
            except BatchTrouble as error:
                self._has_history = False
                log.warning("the ends of jobs are unknown from now on: %s", error)
                break
            for job, ad in ads.items():
                self._warned.pop(job, None)
                self._ran.discard(job)
                end = condor_ads.ended(ad, memory_bytes=self._site.provider.memory_bytes)
                ends[job] = self._add_reason_details(end, ad)
        return ends

    def _read_ads(self, words: list[str]) -> dict[str, Ad]:
        said = self._commands.run(words)
        if said.code:
            raise BatchTrouble(f"{words[0]}: {in_short(said)}")
        return {condor_ads.job_id_of_ad(ad): ad for ad in condor_ads.parse_job_ads(said.out, command=words[0])}

    def _add_warnings(self, statuses: dict[str, BatchJobStatus]) -> None:
        said: set[str] = set()
        for job, status in statuses.items():
            warned = self._warned.get(job, "")
            if warned and warned not in said and status.phase is BlockPhase.PENDING:
                said.add(warned)
                statuses[job] = msgspec.structs.replace(status, reason=f"{status.reason}; {warned}")

    def _add_reason_details(self, status: BatchJobStatus, ad: Ad) -> BatchJobStatus:
        if status.phase is BlockPhase.PENDING:
            analysis = self._analysis if condor_ads.has_no_matching_slot(ad) else ""
            negotiator = self._negotiator if condor_ads.is_unseen_by_negotiator(ad, for_s=_UNSEEN_S) else ""
            more = filter(None, (analysis, negotiator))
            no_node = condor_ads.job_id_of_ad(ad) == self._analyzed and condor_ads.is_every_slot_excluded(analysis)
            return msgspec.structs.replace(status, reason="; ".join([status.reason, *more]), no_node=no_node)
        if condor_ads.has_failed(ad) and ad.get(condor_description.BLOCK):
            lines = last_lines(self._folder, job_name(self._session, str(ad[condor_description.BLOCK])))
            return msgspec.structs.replace(status, reason=": ".join([status.reason, *filter(None, ["; ".join(lines)])]))
        return status

    def _analyze_job_match(self, job: str) -> None:
        self._analyze_at, self._analyzed = time.monotonic() + _ANALYZE_EVERY_S, job
        try:
            said = self._commands.run(["condor_q", "-better-analyze", job])
            self._analysis = condor_ads.summarize_match_analysis(said.out)
            if not self._analysis:
                self._analyze_at = time.monotonic() + _ANALYZE_AGAIN_S
        except BatchTrouble as error:  # the analysis may time out in a large pool
            log.info("no analysis of job %s: %s", job, error)

    def _check_for_negotiator(self) -> None:
        self._negotiator_at = time.monotonic() + _ANALYZE_AGAIN_S
        try:
            said = self._commands.run(["condor_status", "-negotiator", "-af", "Name"])
        except BatchTrouble as error:
            log.info("it is not known whether the pool has a negotiator: %s", error)
            return
        self._negotiator = "" if said.code or said.out.strip() else _NO_NEGOTIATOR

    def _remove(self, jobs: Sequence[str], *, force: bool) -> None:
        for said in self._condor_rm(jobs, *(["-forcex"] if force else [])):
            if said.code:
                log.warning("condor_rm: %s", in_short(said))

    def _condor_rm(self, jobs: Sequence[str], *options: str) -> list[CommandResult]:
        if jobs:
            self._listing.forget()
        return [self._commands.run(["condor_rm", *options, *some]) for some in in_chunks(jobs)]


def warnings(err: str) -> list[str]:
    return _WARNING.findall(err)


def in_short(said: CommandResult) -> str:
    """Return why a command failed, without HTCondor's advice. Addresses are shortened to host and port."""
    error = _ADDRESS.sub(">", said.err.partition("Extra Info:")[0])
    return msgspec.structs.replace(said, err=error).words


def failure(words: str) -> BatchTrouble | SubmissionRefused:
    """Return the error for the message of a failed submission: temporary or permanent."""
    why = words.partition("into the queue.; ERROR: ")[2] or words.removeprefix("ERROR: ")
    return BatchTrouble(why) if _NOT_NOW.search(why) else SubmissionRefused(why)


_JSON = ("-json", "-attributes", ",".join(condor_ads.ATTRIBUTES))
