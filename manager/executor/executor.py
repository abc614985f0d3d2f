"""StokerExecutor: Stoker as an executor of Parsl. Differences from Parsl's own executor (HTEX):

- Failed blocks stop the executor only before the first pilot joins.
- Initial blocks start with the executor, before Parsl's strategy runs.
- Scaling in drains blocks: pilots finish their running calls. After `drain_s` seconds the jobs are cancelled.
- Calls run in the program's folder if pilots can access that folder.
- Python's garbage collector runs less often (after 50,000 new containers), because 100,000 futures may exist.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from pathlib import Path
from typing import Any

from parsl.data_provider.staging import Staging
from parsl.dataflow.dflow import DataFlowKernel
from parsl.executors.errors import BadStateException
from parsl.executors.status_handling import BlockProviderExecutor
from parsl.jobs.states import JobState, JobStatus
from parsl.monitoring.radios.base import RadioConfig
from parsl.monitoring.radios.filesystem import FilesystemRadio
from parsl.providers.base import ExecutionProvider

from stoker.config import Site, load_site, load_sites, write_sites
from stoker.contexts.folders import program_folder
from stoker.contexts.recipe import ObjectRef
from stoker.errors import ConfigError, SessionError
from stoker.folders import refuse_non_utf8_path, working_folder
from stoker.manager.environment.carrying import prepare_packed_environments
from stoker.manager.executor import blocks, detached, engines, processes
from stoker.manager.executor.client import ClientLink
from stoker.manager.executor.futures import CANCELLED, CallFuture
from stoker.manager.executor.kernel import task_being_launched
from stoker.manager.executor.options import CallFolder, check_executor_options, check_local_policy
from stoker.manager.executor.outgoing import ReplacedFunction, wait_for_answer
from stoker.manager.executor.pieces import PieceInbox
from stoker.manager.executor.prepared import (
    PACKED,
    SPECIFICATION,
    AppSpecification,
    FunctionPreparer,
    inline_or_store_arguments,
    is_same_function,
    modules_pickled_with,
)
from stoker.manager.executor.progress import WaitNoticeLogger
from stoker.manager.executor.session_files import ProgramSourceStore
from stoker.manager.factory.pilot_command import build_pilot_command, build_python_path, issue_block_key
from stoker.manager.live.session_policies import (
    copy_policies_into_session,
    create_policies_for_sites,
    honoured_call_options,
)
from stoker.protocol.session import SessionFolder
from stoker.protocol.status import PilotStatus
from stoker.protocol.to_client import Status
from stoker.protocol.to_manager import EndSession
from stoker.site import Engine

logger = logging.getLogger(__name__)

START_LIMIT_S = 60.0
STATUS_LIMIT_S = 2.0
END_LIMIT_S = 10.0
JOIN_LIMIT_S = 2.0
GC_THRESHOLDS = (50_000, 20, 50)


class StokerExecutor(BlockProviderExecutor):  # type: ignore[misc]  # parsl is untyped
    """A Parsl executor whose pilots keep contexts loaded between calls.

    Args:
        site: A site file, a Site, or None for this machine. If the site file has a batch system, the manager's factory
            submits the blocks.
        label: The name of the executor and of its folder.
        provider, session, drain_s, progress: See `stoker.load`.
        working_dir: The folder in which calls run; pilots create a missing folder. The default is the program's folder.
            A pilot that cannot access this folder creates a temporary folder per call.
        storage_access: Parsl's staging providers.
        block_error_handler: A function as in Parsl. True fails all calls if every block fails before the first pilot
            joins; False ignores failed blocks.
        remote_monitoring_radio: The radio of Parsl's monitoring.

    Raises:
        ConfigError: The site is invalid, or options exclude each other.
    """

    def __init__(
        self, site: str | os.PathLike[str] | Site | None = None, label: str = "stoker",
        provider: ExecutionProvider | None = None, *, session: str | os.PathLike[str] | None = None,
        working_dir: str | os.PathLike[str] | None = None, storage_access: Sequence[Staging] | None = None,
        drain_s: float = 60.0, progress: bool = True,
        block_error_handler: bool | Callable[[BlockProviderExecutor, dict[str, JobStatus]], None] = True,
        remote_monitoring_radio: RadioConfig | None = None,
    ) -> None:  # fmt: skip
        check_executor_options(
            site=site, session=session, provider=provider, label=label, working_dir=working_dir, drain_s=drain_s,
            progress=progress, storage_access=storage_access, block_error_handler=block_error_handler,
            remote_monitoring_radio=remote_monitoring_radio,
        )  # fmt: skip
        self.sites = (load_site(site),) if provider is not None else load_sites(site)
        self.site = self.sites[0]
        engines.check_taskvine_sites(self.sites, provider=provider)
        self._honoured_options = None if session is not None else create_policies_for_sites(self.sites).honours
        """Call options that the session's policies honour; None until the executor has joined a session."""
        self._joined_session = os.fspath(session) if session is not None else ""
        batch = len(self.sites) > 1 or not self.site.is_local
        self._factory_starts_blocks = provider is None and batch and self.site.engine is Engine.STOKER
        if provider is None and session is None and not self._factory_starts_blocks:
            if self.site.engine is Engine.STOKER:
                check_local_policy(self.site)
            provider = blocks.create_local_provider(self.site)
        if block_error_handler is True:
            block_error_handler = blocks.fail_calls_if_all_blocks_failed
        super().__init__(provider=provider, block_error_handler=block_error_handler)
        self.label = label
        self.working_dir = os.fspath(working_dir) if working_dir is not None else None
        self.storage_access = storage_access
        self.drain_s = drain_s
        self._progress = progress
        self._wait_notices: WaitNoticeLogger | None = None
        self.remote_monitoring_radio = remote_monitoring_radio or FilesystemRadio()
        self.folder: SessionFolder | None = None
        self.seen_blocks: set[str] = set()
        self._reported_pilots: dict[str, PilotStatus] = {}
        self._manager: processes.ManagerProcess | None = None
        self._link: ClientLink | None = None
        self.preparer: FunctionPreparer  # set by `start`
        self.call_place = CallFolder()
        self._initial_blocks: list[str] | None = None
        self._block_start: Future[list[str]] | None = None
        self._block_monitor = blocks.BlockMonitor(self, lease_s=self.site.session.lease_s)
        self._gc_before: tuple[int, int, int] | None = None
        self._stopped = False
        self._pid = os.getpid()

    def __repr__(self) -> str:
        where = f"session {self._link.session.session}" if self._link else "not started"
        return f"StokerExecutor(label={self.label!r}, site={self.site.name!r}, provider={self.provider!r})  # {where}"

    @property
    def link(self) -> ClientLink:
        """The connection to the manager.

        Raises:
            SessionError: The executor is not started.
        """
        if self._link is None:
            raise SessionError(f"executor {self.label!r} is not started; parsl.load(Config(executors=[...])) starts it")
        return self._link

    # ---- start and end

    def start(self) -> None:
        """Join or start the session with its initial blocks, and connect to its manager."""
        super().start()
        named = "" if self.working_dir is None else os.path.abspath(self.working_dir)
        place = named or working_folder()
        refuse_non_utf8_path(place, what="the folder in which calls run", advice="start the program in another folder")
        self.call_place = CallFolder(named, program_folder())
        try:
            if self._joined_session:
                self.folder, self.site = detached.find_and_restart_session(self._joined_session)
                processes.link_joined_session(self.folder, Path(self.run_dir) / self.label)
                self._honoured_options = honoured_call_options(self.folder)
                self._link = ClientLink(self.folder)
            else:
                self._start_session()
            self._join_session(self.link)
        except BaseException:
            self.shutdown()
            raise
        self._gc_before = raise_gc_thresholds()

    def _join_session(self, link: ClientLink) -> None:
        self.preparer = FunctionPreparer(
            lambda requirements: engines.refuse_unsupported_options(
                self.site, requirements, honours=self._honoured_options
            ),
            on_replaced=lambda function, by: link.queue_message(ReplacedFunction(function, by)),
            store_sources=ProgramSourceStore(link.folder.sources).store_sources,
        )
        link.wait_joined(START_LIMIT_S)
        self._wait_notices = WaitNoticeLogger(
            faults_only=not self._progress, ask=self.ask_status, has_open_calls=lambda: bool(link.open_calls),
            journal_trouble=lambda: link.journal_trouble, why_silent=link.explain_silence,
            is_own_context=link.has_sent_recipe,
        )  # fmt: skip
        self._wait_notices.start()

    def _start_session(self) -> None:
        self.folder = SessionFolder(Path(self.run_dir) / self.label)
        processes.create_session_folder(self.folder)
        copy_policies_into_session(self.folder, self.sites, search_path=build_python_path())
        name = processes.new_session_id()
        engines.write_taskvine_plans(self.folder, self.sites, session=name, python_path=build_python_path())
        if self._factory_starts_blocks:
            write_sites(self.folder.sites, self.sites, python_path=build_python_path())
        prepare_packed_environments(self.folder, self.sites)
        options = ["--name", name, *processes.manager_command_options(self.sites)]
        self._manager = processes.ManagerProcess(self.folder, on_lost=self.set_bad_state_and_fail_all, options=options)
        self._manager.wait_listening(START_LIMIT_S)
        processes.register_session(self.folder)
        self._link = ClientLink(self.folder)
        self._start_blocks()

    def shutdown(self) -> None:
        """Cancel open calls, and end pilots and manager unless the executor has joined a session."""
        if self._stopped or os.getpid() != self._pid:  # a forked child must not end its parent's session
            return
        if self.submit_monitoring_radio is not None:
            if (answer := self.ask_status()) is not None:
                self._report_nodes_to_monitoring(answer.pilots)
            self._report_nodes_to_monitoring(())
        self._stopped = True
        if self._wait_notices is not None:
            self._wait_notices.stop()
        if self._gc_before is not None and gc.get_threshold() == GC_THRESHOLDS:
            gc.set_threshold(*self._gc_before)
        if not self._joined_session:
            self._end_session()
        elif self._link is not None:
            self._link.cancel_calls_and_wait(END_LIMIT_S)
            self._link.close()
        super().shutdown()

    def _end_session(self) -> None:
        if self._manager is not None:
            self._manager.expect_manager_exit()
        if self._block_start is not None:
            wait([self._block_start])
        exiting_blocks: set[str] = set()
        joined = self._link is not None and self._link.membership.has_joined(within_s=JOIN_LIMIT_S)
        is_up = self._manager is not None and self._manager.is_running()
        if self._link is not None and joined and is_up and not self._link.wait_finished(0):
            with suppress(Exception):  # if the status request fails, `end_all_jobs` cancels all jobs at once
                status = wait_for_answer(self._link.ask_status(), timeout_s=STATUS_LIMIT_S)
                exiting_blocks = {pilot.block for pilot in status.pilots}
            self._link.send_message(EndSession("the program is done"))
            self._link.wait_finished(END_LIMIT_S)
        blocks.end_all_jobs(self, exiting_blocks=exiting_blocks)
        if self._manager is not None:
            # Without a joined client, the manager has received no EndSession message, so do not wait for its exit.
            self._manager.end_process(grace_s=END_LIMIT_S / 2 if joined else 0)
        if self._factory_starts_blocks and self.folder is not None:
            blocks.wait_until_factory_jobs_end(self.folder)
        if self._link is not None:
            self._link.close()
            shutil.rmtree(self._link.folder.objects, ignore_errors=True)  # files of large arguments and results

    def _start_blocks(self) -> None:
        """Start blocks on a thread, so that Ctrl-C cannot interrupt a submission before its job is recorded."""
        if self.provider is not None and self.provider.init_blocks > 0:
            if getattr(self.provider, "script_dir", "") is None:
                self.provider.script_dir = os.path.join(self.run_dir, "submit_scripts")
                os.makedirs(self.provider.script_dir, exist_ok=True)
            thread = ThreadPoolExecutor(1, thread_name_prefix="stoker-blocks")
            self._block_start = thread.submit(self.scale_out_facade, self.provider.init_blocks)
            thread.shutdown(wait=False)
            self._initial_blocks = self._block_start.result()

    def submit(
        self, func: Callable[..., Any], resource_specification: Mapping[str, Any] | None, *args: Any, **kwargs: Any
    ) -> CallFuture:
        """Return the future of a new call.

        Args:
            func: The function to call.
            resource_specification: Options of the call; keys as in `stoker.manager.executor.options.KEYS`.
            *args, **kwargs: Arguments of the function.

        Raises:
            SpecificationError: The specification has a wrong key or value.
            SerializationError: The function or an argument cannot be pickled.
            Exception: The error that caused the executor's bad state.
        """
        if self.bad_state_is_set:
            raise self.executor_exception
        link = self.link
        if resource_specification is CANCELLED:
            future = CallFuture(link)
            future.cancel()
            return future
        prepared = self.preparer.prepare_function(func)
        requirements, inbox, blob = self.preparer.parse_specification(resource_specification), None, None
        packed = kwargs.pop(PACKED, None)
        if isinstance(resource_specification, AppSpecification):
            inbox = resource_specification.inbox
            kwargs.pop(SPECIFICATION, None)
            if is_same_function(resource_specification.pickled_from, func):  # false if Parsl has wrapped `func`
                blob = resource_specification.function
        elif (read := prepared.read_parsl_spec(args, kwargs)) is not None:
            requirements, args, kwargs = read
        if requirements.options.stream:
            inbox = inbox or PieceInbox(keeps_all=True)
        future = CallFuture(link, inbox=inbox)
        requirements = requirements.with_context_for(args, kwargs)
        due_at = getattr(resource_specification, "due_at", None)
        submission = prepared.create_submission(func, requirements, place=self.call_place, due_at=due_at, blob=blob)
        future.due_at = submission.due_at
        if packed is None:
            packed = prepared.pickle_arguments(
                args, kwargs, by_name=modules_pickled_with(submission.function, submission.recipe)
            )
        payload = inline_or_store_arguments(packed, name=prepared.name, large=link.large_arguments)
        task = task_being_launched()
        if task is not None and task["resource_specification"] is CANCELLED:  # the program has just cancelled the call
            if isinstance(payload, ObjectRef):
                link.large_arguments.release_file(payload)
            future.cancel()
            return future
        future.call = link.submit(submission, payload, future, features=requirements.features, inbox=inbox)
        return future

    def outstanding(self) -> int:
        """Return the number of slots that open calls need. Parsl's kernel starts blocks for these slots."""
        return self._link.open_calls.slots if self._link else 0

    def monitor_resources(self) -> bool:
        """Return False, because Parsl cannot monitor single calls of a library's process."""
        return False

    def set_bad_state_and_fail_all(self, exception: Exception) -> None:
        """Fail all open calls and refuse new calls.

        Args:
            exception: The exception that the calls raise.
        """
        logger.error("executor %s cannot continue: %s", self.label, exception)
        self._executor_exception = exception
        self._executor_bad_state.set()
        if self._link is not None:
            bad = BadStateException(self, exception)  # the exception type that users of Parsl expect
            bad.__cause__ = exception
            self._link.fail_all(bad)

    def ask_status(self, timeout_s: float = STATUS_LIMIT_S) -> Status | None:
        """Return the session's status; None if the manager does not answer.

        Args:
            timeout_s: Seconds to wait for the answer.
        """
        if self._link is None or self._stopped:
            return None
        try:
            return wait_for_answer(self._link.ask_status(), timeout_s=timeout_s)
        except (FutureTimeoutError, SessionError, BadStateException):
            return None

    # ---- blocks

    @property
    def workers_per_node(self) -> int:
        """Number of calls that a node runs at once."""
        pilot = self.site.pilot
        if pilot.cpu_count:
            return pilot.cpu_count
        return 1 if pilot.devices == "gpu" or pilot.offers_gpus_and_cpus else len(os.sched_getaffinity(0))

    def scale_out_facade(self, n: int) -> list[str]:
        """Return the ids of started blocks. The first call returns the initial blocks.

        Args:
            n: Number of blocks.
        """
        early, self._initial_blocks = self._initial_blocks, None
        if early is not None and n == self.provider.init_blocks and len(self._status) == n:
            return early
        started: list[str] = super().scale_out_facade(n)
        self.send_block_states()
        return started

    def scale_in(self, blocks_wanted: int, max_idletime: float | None = None) -> list[str]:
        """Return the ids of blocks to drain, idle blocks first. The jobs of these blocks are cancelled after `drain_s`
        seconds.

        Args:
            blocks_wanted: Number of blocks to drain.
            max_idletime: If not None, drain only idle blocks.
        """
        chosen = blocks.choose_blocks_to_drain(self, blocks_wanted, idle_only=max_idletime is not None)
        self._block_monitor.drain(chosen, self.link, within_s=self.drain_s)
        return chosen

    def status(self) -> dict[str, JobStatus]:
        """Return the state of every block. A block that completed before any of its pilots joined is MISSING."""
        status: dict[str, JobStatus] = super().status()
        answer = self.ask_status()
        if answer is not None:
            self.seen_blocks.update(pilot.block for pilot in answer.pilots)
            self._report_nodes_to_monitoring(answer.pilots)
            for block, job in status.items():
                if job.state is JobState.COMPLETED and block not in self.seen_blocks and not answer.gone_pilots:
                    job.state = JobState.MISSING
                    job.message = job.message or "the job ended before its pilot reached the manager"
        self._block_monitor.cancel_due_jobs(status, emptied=None if answer is None else answer.emptied_blocks)
        self.send_block_states()
        return status

    def _report_nodes_to_monitoring(self, pilots: Iterable[PilotStatus]) -> None:
        if self.submit_monitoring_radio is not None:
            self._reported_pilots = blocks.report_nodes_to_monitoring(
                self.submit_monitoring_radio, pilots, self._reported_pilots, run_id=self.run_id
            )

    def send_block_states(self) -> None:
        """Send the states of this executor's blocks to the manager."""
        if self._link is not None and not self._stopped:
            self._block_monitor.report_states(self._status, self._link)

    def _get_launch_command(self, block_id: str) -> str:
        issue_block_key(self.link.folder, block_id)
        return build_pilot_command(self.site, folder=self.link.folder, block=block_id, python_path=build_python_path())


def stoker_executors(kernel: DataFlowKernel, name: str) -> list[StokerExecutor]:
    found = [executor for executor in kernel.executors.values() if isinstance(executor, StokerExecutor)]
    if not found:
        labels = ", ".join(label for label in kernel.executors if label != "_parsl_internal")
        raise SessionError(
            f"{name} needs a StokerExecutor, but Parsl was loaded with {labels} only; add an executor to Config:\n\n"
            "  Config(executors=[stoker.StokerExecutor()])\n"
        )
    return found


def check_executor_labels(kernel: DataFlowKernel, labels: Iterable[str], *, name: str) -> None:
    loaded = [label for label in kernel.executors if label != "_parsl_internal"]
    for label in labels:
        if label not in loaded:
            raise ConfigError(
                f"{name}: executors: no executor {label!r} is loaded; loaded are {', '.join(loaded)}", key="executors"
            )
        if not isinstance(kernel.executors[label], StokerExecutor):
            kind = type(kernel.executors[label]).__name__
            raise ConfigError(
                f"{name}: executors: {label!r} is a {kind}, and a @stoker.app runs only on StokerExecutors; to use it"
                f" write Parsl's @python_app(executors=[{label!r}])",
                key="executors",
            )


def raise_gc_thresholds() -> tuple[int, int, int]:
    """Make garbage collection rarer. Return the earlier thresholds."""
    before = gc.get_threshold()
    if 0 < before[0] < GC_THRESHOLDS[0]:  # keep a higher threshold; 0 means a disabled collector
        gc.set_threshold(*GC_THRESHOLDS)
    return before
