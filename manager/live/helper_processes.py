"""Start two helpers. The factory submits blocks. The seed sends objects to pilots that have no shared file system.

A lock in the session folder allows one factory and one seed. The helpers exit only when the session ends, so they
outlive a killed manager. The manager reports a factory without a hello message after `SILENCE_REPORT_S`, and restarts
it after its time limit.
"""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from stoker import connections
from stoker.config import load_site
from stoker.log_files import read_last_lines
from stoker.protocol.blocks import ProvisioningRule, Source
from stoker.protocol.session import SessionFolder
from stoker.retries import RetryPause
from stoker.site import KINDS_THAT_EXCLUDE_NODES, Engine, EnvironmentKind, ProviderKind, ProvisioningName, Site

log = logging.getLogger("stoker.manager")

FACTORY = "stoker.manager.factory.main"
SEED = "stoker.pilot.transfer.seed"
CHECK_S = 1.0
PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
SILENCE_REPORT_S = 20.0
HELLO_S = 120.0
"""Seconds in which a factory must send its hello, in addition to the time limit of batch commands."""
_TAIL_BYTES = 4096
_TIME_AND_LEVEL = re.compile(r"^\d{4}-\S+ \S+ [A-Z]+ ")


def start_helper(
    module: str, folder: SessionFolder, *options: str, log: str, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a helper process, whose output goes to the session's file `log`. Raises OSError."""
    with open(folder.path / log, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, "--session", str(folder.path), *options],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=pass_fds, start_new_session=True,
        )  # fmt: skip
    connections.restore_descriptor_limit(process.pid)
    return process


class HelperSupervisor:
    def __init__(
        self,
        folder: SessionFolder,
        module: str,
        *,
        has_sent_hello: Callable[[], bool] = lambda: True,
        hello_limit_s: float = math.inf,
    ) -> None:
        self._folder = folder
        self._module = module
        self._name = module.split(".")[-2 if module.endswith(".main") else -1]
        self._log = folder.path / f"{self._name}.log"
        self._has_sent_hello = has_sent_hello
        self._hello_limit_s = hello_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._log_offset = 0
        self._silent_since: float | None = None
        self._pause = RetryPause(PAUSE_S, LONGEST_PAUSE_S)

    def restart_or_kill_process(self, now: float) -> None:
        if self._has_sent_hello():
            self._silent_since = None
            if self._hello_limit_s < math.inf:  # the process has sent its hello, so its start succeeded
                self._pause.reset()
        elif self._silent_since is None:
            self._silent_since = now
        process = self._process
        if process is not None and process.poll() is None:
            if now - self._started_at > LONGEST_PAUSE_S:
                self._pause.reset()
            if self._silent_since is not None and now - max(self._silent_since, self._started_at) > self._hello_limit_s:
                trouble = self._describe_process_trouble(process)
                log.warning("%s; it is killed after %.0f s", trouble, self._hello_limit_s)
                process.kill()
                self._started_at = now  # the next check must not kill the process again
            return
        if process is not None:
            if now - self._started_at < self._pause.seconds:
                return
            log.warning("the %s ended (%s); it is started again", self._name, process.returncode)
            self._pause.next_pause_s()
        self._started_at = now
        try:
            self._log_offset = self._log.stat().st_size if self._log.exists() else 0
            self._process = start_helper(self._module, self._folder, "--parent", str(os.getpid()), log=self._log.name)
        except OSError as error:  # the host may be out of file descriptors, memory or processes
            log.warning("the %s cannot be started (%s); the manager tries again", self._name, error)

    def describe_trouble(self, now: float) -> str:
        if self._process is None or self._silent_since is None or now - self._silent_since < SILENCE_REPORT_S:
            return ""
        return self._describe_process_trouble(self._process)

    def _describe_process_trouble(self, process: subprocess.Popen[bytes]) -> str:
        code = process.poll()
        is_so = "runs but has not connected" if code is None else f"has ended ({code}) and will be started again"
        lines = read_last_lines(self._log, start=self._log_offset, most_bytes=_TAIL_BYTES).splitlines()
        said = _TIME_AND_LEVEL.sub("", next((line for line in reversed(lines) if line.strip()), ""))
        words = f"its log says: {said}" if said else "its log says nothing"
        return f"the {self._name} (pid {process.pid}) {is_so}; {words}"


class HelperProcesses:
    def __init__(self, folder: SessionFolder, sites: tuple[Site, ...], *, is_factory_here: Callable[[], bool]) -> None:
        self._supervisors: list[HelperSupervisor] = []
        if sites:
            limit_s = HELLO_S + max(site.provider.command_limit_s for site in sites)
            self._supervisors.append(
                HelperSupervisor(folder, FACTORY, has_sent_hello=is_factory_here, hello_limit_s=limit_s)
            )
        if any(not site.provider.shared_files or site.environment.kind is EnvironmentKind.PACKED for site in sites):
            self._supervisors.append(HelperSupervisor(folder, SEED))
        self._check_at = 0.0
        self.factory_trouble = ""
        """Reason why no blocks are submitted, or empty."""

    def start_missing_processes(self) -> None:
        now = time.monotonic()
        if not self._supervisors or now < self._check_at:
            return
        self._check_at = now + CHECK_S
        for supervisor in self._supervisors:
            supervisor.restart_or_kill_process(now)
        # Only a factory's supervisor waits for a hello, so at most one text is not empty.
        trouble = "".join(supervisor.describe_trouble(now) for supervisor in self._supervisors)
        self.factory_trouble = f"blocks are not submitted: {trouble}" if trouble else ""

    @property
    def wait_s(self) -> float:
        return max(0.0, self._check_at - time.monotonic()) if self._supervisors else math.inf


def load_session_sites(folder: SessionFolder) -> tuple[Site, ...]:
    return tuple(load_site(file) for file in sorted(folder.sites.glob("*.toml")))


def create_source(site: Site, *, kept: bool) -> Source:
    """Return the blocks that a site file allows. `kept`: True if the session continues without connected programs."""
    provider, pilot, policy = site.provider, site.pilot, site.policy
    slots = pilot.cpu_count or provider.gpu_count
    if site.engine is Engine.TASKVINE:  # TaskVine's pool is one permanent pilot, which manages its own workers
        return Source(
            name=site.name, rule=ProvisioningRule.FIXED, first=1, least=1, most=1, slots=slots * pilot.max_blocks
        )
    default = ProvisioningRule.FIXED if site.is_local else ProvisioningRule.OPPORTUNISTIC
    is_default = policy.provisioning is ProvisioningName.DEFAULT
    return Source(
        name=site.name, rule=default if is_default else ProvisioningRule(policy.provisioning.value),
        first=pilot.init_blocks, least=pilot.min_blocks, most=pilot.max_blocks, keep_pending=policy.keep_pending,
        idle_s=policy.idle_release_s(outlives_programs=kept), finish_within_s=float(policy.finish_within_s),
        nodes=provider.pilots_per_block, slots=slots,
        walltime_s=0.0 if provider.kind is ProviderKind.LOCAL else float(provider.walltime_s),
        exclude_nodes=provider.exclude_nodes if provider.kind in KINDS_THAT_EXCLUDE_NODES else 0,
        probe_nodes_s=float(provider.probe_nodes_s),
    )  # fmt: skip
