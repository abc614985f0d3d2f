"""The factory's interface to HTCondor's own commands.

`condor_q -json` lists the session's jobs, and `condor_history` lists the jobs that left the queue. If a setting is
unknown, `condor_submit` only prints a warning, so Stoker shows the warning while the job waits. If no slot matches a
job, `condor_q -better-analyze` runs every 5 minutes.
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
from stoker.manager.factory.allowed_nodes import restrict_to_allowed_nodes
from stoker.manager.factory.batch import (
    BatchJobStatus,
    BatchSystemError,
    CommandUnanswered,
    SubmissionRefused,
    job_name,
)
from stoker.manager.factory.commands import CommandResult, CommandRunner, last_output_lines, split_into_chunks
from stoker.manager.factory.condor_ads import JobAd, JobStatus
from stoker.manager.factory.pacing import RequestPacer, SharedListing
from stoker.protocol.blocks import ANYWHERE, AllowedNodes, BlockPhase
from stoker.protocol.ids import BlockId
from stoker.site import Site

log = logging.getLogger("stoker.factory")

_ANALYSIS_INTERVAL_S = 300.0
_ANALYSIS_RETRY_S = 60.0
"""If an analysis gave no result, it is repeated after this many seconds."""
_NEGOTIATION_WAIT_S = 180.0
"""If HTCondor has not tried to match a job for this many seconds, the status of the job says so."""
_NO_NEGOTIATOR = "the pool has no negotiator at the moment, so no job starts"
_GONE_FROM_QUEUE = BatchJobStatus(
    BlockPhase.ENDED, "gone from the queue, and condor_history does not list the job", is_unlisted=True
)
_SUBMITTED_ID = re.compile(r"^(\d+)\.(\d+) - \d+\.\d+\s*$", re.MULTILINE)
_WARNING = re.compile(r"^WARNING: (?!Committed job submission )(?:QMGMT:\d+:)?(.*)$", re.MULTILINE)
_TEMPORARY_ERROR = re.compile(
    r"can't find address|unable to locate|failed to (connect|fetch|begin|end|commit|send|create new)|couldn't contact"
    r"|CEDAR:6\d{3}|SECMAN:2\d{3}|timed out"
    r"|connection (closed|refused)|communication error|unknown error code|MAX_JOBS_(SUBMITTED|PER_OWNER)"
    r"|try again",
    re.IGNORECASE,
)
"""Temporary errors of condor_submit: the job can be submitted again later."""
_ADDRESS_OPTIONS = re.compile(r"(?<=\d)\?[^>\s]*>")
"""Options in an address, which are removed: `<127.0.0.1:9618?addrs=127.0.0.1-9618&alias=submit.pool>`."""
_JOB_IS_GONE = re.compile(
    r"^(Job \S+ (not found|already marked for removal|not in `X' state.*)|Couldn't find/remove .*)$"
)


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
        held_s: float = condor_ads.MAX_HELD_S,
        pacer: RequestPacer | None = None,
    ) -> None:
        self._site = site
        self._session = session
        self._folder = folder
        self._command = command
        self._files = [os.path.relpath(file, folder) for file in files]
        self._key = key
        self._held_s = held_s
        self._commands = CommandRunner(limit_s=site.provider.command_limit_s, folder=folder, pacer=pacer)
        self._listing: SharedListing[dict[str, JobAd]] = self._commands.pacer.listing
        self._submission_warnings: dict[str, str] = {}
        self._jobs_seen_running: set[str] = set()
        self._has_history = True
        self._analyze_at, self._analysis, self._analyzed_job = -math.inf, "", ""
        self._negotiator_at, self._negotiator = -math.inf, ""

    def submit(self, block: BlockId, allowed: AllowedNodes = ANYWHERE) -> str:
        name, site = job_name(self._session, block), restrict_to_allowed_nodes(self._site, allowed)
        script = condor_description.render_script(site, command=self._command(block))
        keys = [os.path.relpath(self._key(block), self._folder)] if self._key is not None else []
        text = condor_description.render_description(
            site, session=self._session, block=block, files=[*self._files, *keys]
        )
        for suffix, content in (("sub", text), ("sh", script)):
            (self._folder / f"{name}.{suffix}").write_text(content, errors="surrogateescape")
        (self._folder / f"{name}.sh").chmod(0o700)
        self._listing.forget()
        said = self._commands.run(["condor_submit", "-terse", f"{name}.sub"])
        self._listing.forget()
        if said.code:
            raise build_submission_error(short_failure_reason(said))
        found = _SUBMITTED_ID.search(said.out)
        if not found:
            raise CommandUnanswered(f"condor_submit printed no job id: {short_failure_reason(said)}")
        job = f"{found[1]}.{found[2]}"
        if warned := find_warnings(said.err):
            words = f"condor_submit warned: {'; '.join(warned)}"
            if words not in self._submission_warnings.values():
                log.warning("block %s: %s", block, words)
            self._submission_warnings[job] = words
        return job

    def query(self, jobs: Sequence[str]) -> Mapping[str, BatchJobStatus]:
        """Return the states of jobs, and remove jobs that HTCondor has held for too long."""
        queued = self._list_queued_jobs()
        judge = partial(condor_ads.judge_job, held_s=self._held_s, memory_bytes=self._site.provider.memory_bytes)
        verdicts = {job: judge(queued[job], has_run=job in self._jobs_seen_running) for job in jobs if job in queued}
        self._jobs_seen_running |= {job for job in verdicts if queued[job].get("JobStatus") == JobStatus.RUNNING}
        hopeless = {job: verdict.force for job, verdict in verdicts.items() if verdict.remove}
        for force in (False, True):
            self._remove_jobs([job for job in hopeless if hopeless[job] is force], force=force)
        unmatched = [job for job in verdicts if condor_ads.has_no_matching_slot(queued[job])]
        if unmatched and time.monotonic() > self._analyze_at:
            self._analyze_job_match(unmatched[0])
        unseen = any(condor_ads.is_unseen_by_negotiator(queued[job], for_s=_NEGOTIATION_WAIT_S) for job in verdicts)
        if not unseen:
            self._negotiator_at, self._negotiator = -math.inf, ""
        elif not unmatched and time.monotonic() > self._negotiator_at:
            self._check_for_negotiator()
        statuses = {job: self._add_reason_details(verdict.status, queued[job]) for job, verdict in verdicts.items()}
        self._add_warnings(statuses)
        return statuses | self._read_ends_from_history([job for job in jobs if job not in queued])

    def cancel(self, jobs: Sequence[str]) -> None:
        for said in self._condor_rm(jobs):
            wrong = [line for line in said.err.splitlines() if line.strip() and not _JOB_IS_GONE.match(line.strip())]
            if said.code and wrong:
                raise BatchSystemError(f"condor_rm: {short_failure_reason(said)}")

    def find(self) -> Mapping[str, BlockId]:
        # HTCondor lists a removed job as unfinished until its machine answers.
        return {
            job: BlockId(str(ad[condor_description.BLOCK]))
            for job, ad in self._list_queued_jobs().items()
            if condor_description.BLOCK in ad and ad.get("JobStatus") != JobStatus.COMPLETED
        }

    def _list_queued_jobs(self) -> dict[str, JobAd]:
        words = ["condor_q", *_JSON, "-constraint", condor_description.session_constraint(self._session)]
        ads = self._listing.read(lambda: self._read_ads(words))
        return {job: ad for job, ad in ads.items() if ad.get(condor_description.SOURCE) == self._site.name}

    def _read_ends_from_history(self, jobs: Sequence[str]) -> dict[str, BatchJobStatus]:
        ends = dict.fromkeys(jobs, _GONE_FROM_QUEUE)
        for some in split_into_chunks(jobs) if self._has_history else ():
            try:
                ads = self._read_ads(["condor_history", *_JSON, "-limit", str(len(some)), *some])
            except BatchSystemError as error:
                self._has_history = False
                log.warning("the ends of jobs are unknown from now on: %s", error)
                break
            for job, ad in ads.items():
                self._submission_warnings.pop(job, None)
                self._jobs_seen_running.discard(job)
                end = condor_ads.build_end_status(ad, memory_bytes=self._site.provider.memory_bytes)
                ends[job] = self._add_reason_details(end, ad)
        return ends

    def _read_ads(self, words: list[str]) -> dict[str, JobAd]:
        said = self._commands.run(words)
        if said.code:
            raise BatchSystemError(f"{words[0]}: {short_failure_reason(said)}")
        return {condor_ads.job_id_of_ad(ad): ad for ad in condor_ads.parse_job_ads(said.out, command=words[0])}

    def _add_warnings(self, statuses: dict[str, BatchJobStatus]) -> None:
        said: set[str] = set()
        for job, status in statuses.items():
            warned = self._submission_warnings.get(job, "")
            if warned and warned not in said and status.phase is BlockPhase.PENDING:
                said.add(warned)
                statuses[job] = msgspec.structs.replace(status, reason=f"{status.reason}; {warned}")

    def _add_reason_details(self, status: BatchJobStatus, ad: JobAd) -> BatchJobStatus:
        if status.phase is BlockPhase.PENDING:
            analysis = self._analysis if condor_ads.has_no_matching_slot(ad) else ""
            negotiator = self._negotiator if condor_ads.is_unseen_by_negotiator(ad, for_s=_NEGOTIATION_WAIT_S) else ""
            more = filter(None, (analysis, negotiator))
            no_node = condor_ads.job_id_of_ad(ad) == self._analyzed_job and condor_ads.is_every_slot_excluded(analysis)
            return msgspec.structs.replace(status, reason="; ".join([status.reason, *more]), no_node=no_node)
        if condor_ads.has_failed(ad) and ad.get(condor_description.BLOCK):
            lines = last_output_lines(self._folder, job_name(self._session, str(ad[condor_description.BLOCK])))
            return msgspec.structs.replace(status, reason=": ".join([status.reason, *filter(None, ["; ".join(lines)])]))
        return status

    def _analyze_job_match(self, job: str) -> None:
        self._analyze_at, self._analyzed_job = time.monotonic() + _ANALYSIS_INTERVAL_S, job
        try:
            said = self._commands.run(["condor_q", "-better-analyze", job])
            self._analysis = condor_ads.summarize_match_analysis(said.out)
            if not self._analysis:
                self._analyze_at = time.monotonic() + _ANALYSIS_RETRY_S
        except BatchSystemError as error:  # the analysis may time out in a large pool
            log.info("no analysis of job %s: %s", job, error)

    def _check_for_negotiator(self) -> None:
        self._negotiator_at = time.monotonic() + _ANALYSIS_RETRY_S
        try:
            said = self._commands.run(["condor_status", "-negotiator", "-af", "Name"])
        except BatchSystemError as error:
            log.info("it is not known whether the pool has a negotiator: %s", error)
            return
        self._negotiator = "" if said.code or said.out.strip() else _NO_NEGOTIATOR

    def _remove_jobs(self, jobs: Sequence[str], *, force: bool) -> None:
        for said in self._condor_rm(jobs, *(["-forcex"] if force else [])):
            if said.code:
                log.warning("condor_rm: %s", short_failure_reason(said))

    def _condor_rm(self, jobs: Sequence[str], *options: str) -> list[CommandResult]:
        if jobs:
            self._listing.forget()
        return [self._commands.run(["condor_rm", *options, *some]) for some in split_into_chunks(jobs)]


def find_warnings(err: str) -> list[str]:
    return _WARNING.findall(err)


def short_failure_reason(said: CommandResult) -> str:
    """Return why a command failed, without HTCondor's advice and without the options in addresses."""
    error = _ADDRESS_OPTIONS.sub(">", said.err.partition("Extra Info:")[0])
    return msgspec.structs.replace(said, err=error).failure_reason


def build_submission_error(words: str) -> BatchSystemError | SubmissionRefused:
    """Return the exception for a failed submission: BatchSystemError if a later try may succeed."""
    why = words.partition("into the queue.; ERROR: ")[2] or words.removeprefix("ERROR: ")
    return BatchSystemError(why) if _TEMPORARY_ERROR.search(why) else SubmissionRefused(why)


_JSON = ("-json", "-attributes", ",".join(condor_ads.ATTRIBUTES))
