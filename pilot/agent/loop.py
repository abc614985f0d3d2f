"""The agent's loop, and `execute_command`, which has one case per command of the core.

Each iteration waits for an event, reads all input, passes the input to the core, and executes the core's commands. It
then sends one frame to the manager and one frame to each library.
"""

from __future__ import annotations

import functools
import logging
import select
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import assert_never

from stoker.log_files import OUTPUT_BYTES, free_file_middle
from stoker.pilot.agent import objects, observing, processes
from stoker.pilot.agent.agent import Agent
from stoker.pilot.agent.observing import report_lost_resources
from stoker.pilot.cache import store
from stoker.pilot.core import commands, events, limits, presence
from stoker.pilot.zygote.client import Zygote

# ---- logs of libraries

log = logging.getLogger("stoker.pilot")

_LOGS_EVERY_S = 10.0


def shorten_long_logs(agent: Agent) -> None:
    """Shorten long logs of libraries forever. Runs in a thread, because the file system may hang."""
    refused = set[Path]()  # logs on file systems that cannot punch a hole in a file
    while True:
        time.sleep(_LOGS_EVERY_S)
        for path in [Path(agent.state.log_path(number)) for number in list(agent.processes)]:
            try:
                if path not in refused and free_file_middle(path, most_bytes=OUTPUT_BYTES):
                    log.warning("%s is too long: its middle is removed", path)
            except FileNotFoundError:
                continue
            except OSError as error:
                refused.add(path)
                log.warning("%s keeps growing: its file system cannot free the middle of a file: %s", path, error)


# ---- the loop

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # these signals make the pilot drain
_TICK_S = 1.0
_LEAVING_TICK_S = 0.1
_REPEATED_SIGNAL_S = 1.0  # seconds in which a repeated signal is ignored: srun and Slurm both send the signal


class AgentLoop:
    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        agent.execute_command = functools.partial(execute_command, agent)
        threading.Thread(target=shorten_long_logs, args=(agent,), name="logs", daemon=True).start()
        self._signals: list[tuple[str, bool]] = []  # names of new signals, each with True if the signal is a repetition
        self._signal_at = 0.0
        self._observe_at = 0.0
        self._devices_at = 0.0
        self._tick_at = 0.0
        self._due = 0.0  # time of the next timer, tick or measurement, on the monotonic clock
        self._wait_ended_at = 0.0  # time when the last wait ended; 0 before the first wait
        self._frames_fd, self._changes_fd = agent.link.dealer.filenos()
        for number in (self._frames_fd, self._changes_fd, agent.wake_read):
            agent.poller.watch_descriptor(number)

    def run(self) -> int:
        self._install_signal_handlers()
        agent, link = self.agent, self.agent.link
        observing.report_remaining_walltime(agent)
        try:
            observing.wait_for_probes(agent, interrupted=lambda: bool(self._signals))
            while not agent.must_exit:
                has_frames, has_changes = self._wait_and_read()
                if has_changes and link.dealer.handle_connection_changes():
                    self._send_hello()
                if has_frames:
                    for message in link.receive_messages():
                        agent.handle_event(events.FromManager(message))
                if link.dealer.connected and presence.must_send_hello(agent.state):
                    self._send_hello()
                while self._signals:
                    name, again = self._signals.pop(0)
                    agent.handle_event(events.SignalReceived(f"it received {name}", again))
                now = time.monotonic()
                if now >= self._due:
                    self._do_timed_work(now)
                agent.poller.send_queued_messages()
                link.send_queued_frames()
            self._say_farewell()
        finally:
            self._close()
        return agent.state.exit_code

    # ---- one turn

    def _wait_and_read(self) -> tuple[bool, bool]:
        """Wait for an event and read all input except the manager's frames. Check for frames first, because the
        descriptor of a ZeroMQ socket reports only frames that arrive after the last use of the socket. Return whether
        frames have arrived, and whether the connection may have changed.
        """
        agent, wires = self.agent, self.agent.poller
        has_frames, has_changes, was_woken = agent.link.dealer.has_frames(), not self._wait_ended_at, False
        now = time.monotonic()
        self._due = self._next_wakeup_time(now)
        timeout = 0.0 if has_frames else max(0.0, self._due - now)
        news = wires.wait_for_events(timeout)
        self._report_suspension(timeout)
        for number, what in news:
            if number == self._frames_fd:
                has_frames = True
            elif number == self._changes_fd:
                has_changes = True
            elif number == agent.wake_read:
                was_woken = True
            elif (source := wires.watched_source(number)) is not None:
                if what & select.EPOLLOUT:
                    source.send_unsent()
                    wires.watch(source)
                if what & ~select.EPOLLOUT:
                    if isinstance(source, Zygote):
                        processes.handle_zygote_messages(agent, source)
                    else:
                        agent.receive_library_messages(source)
        if was_woken:
            agent.run_queued_actions()
        return has_frames, has_changes

    def _report_suspension(self, waited_s: float) -> None:
        """Shorten long library logs in an endless loop. Runs in a thread: the file system may hang."""
        now, before = time.monotonic(), self._wait_ended_at
        self._wait_ended_at = now
        stopped_s = now - before - waited_s
        if before and stopped_s > limits.SUSPENSION_DELAY_S:
            self.agent.handle_event(events.WasSuspended(stopped_s))

    def _next_wakeup_time(self, now: float) -> float:
        agent, state = self.agent, self.agent.state
        if state.leaving:  # wake soon: a draining pilot may receive no further event
            self._tick_at = min(self._tick_at, now + _LEAVING_TICK_S)
        due = min(presence.next_deadline(state), agent.timers.next_due_at, self._tick_at)
        return min(due, self._observe_at) if agent.processes or not agent.link.dealer.connected else due

    def _do_timed_work(self, now: float) -> None:
        agent, state = self.agent, self.agent.state
        for key in agent.timers.take_due(now):
            agent.handle_event(events.TimerFired(key))
        if now >= self._observe_at:
            self._observe_at = now + limits.OBSERVATION_INTERVAL_S
            observing.report_observations(agent, agent.processes.values())
            if now >= self._devices_at:
                self._devices_at = now + 1.0
                observing.report_device_memory_use(agent)
            if not agent.link.dealer.connected:
                agent.handle_event(agent.link.make_absence_event(now))
        if now >= state.heartbeat_at:
            observing.report_usage(agent)
            agent.handle_event(events.CacheListed(agent.cache.object_sizes()))
            for zygote in agent.zygotes.long_idle_zygotes():
                agent.poller.unwatch(zygote)
                agent.zygotes.remove_zygote(zygote)
        if now >= min(self._tick_at, presence.next_tick_deadline(state)):
            self._tick_at = now + (_LEAVING_TICK_S if state.leaving else _TICK_S)
            report_lost_resources(agent)
            observing.report_driver_health(agent)
            agent.handle_event(events.Tick(serves_peers=agent.peers.is_serving))

    def _send_hello(self) -> None:
        self.agent.handle_event(self.agent.link.make_hello_event(list(self.agent.cache.object_sizes())))

    # ---- the end

    def _install_signal_handlers(self) -> None:
        signal.set_wakeup_fd(self.agent.wake_write, warn_on_full_buffer=False)
        for how in TERMINATION_SIGNALS:
            if signal.getsignal(how) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(how, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINATION_SIGNALS)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now, before = time.monotonic(), self._signal_at
        self._signal_at = now
        if not before or now - before > _REPEATED_SIGNAL_S:
            self._signals.append((signal.Signals(number).name, bool(before)))

    def _say_farewell(self) -> None:
        agent = self.agent
        agent.handle_event(
            events.Farewell({number: process.recorded_calls() for number, process in agent.processes.items()})
        )
        if agent.state.says_farewell:
            agent.link.send_last_frames(agent.handle_event, pause=lambda: agent.poller.wait_for_events(0.02))

    def _close(self) -> None:
        agent = self.agent
        for monitor in agent.monitors.values():
            monitor.close()
        agent.peers.close()
        for name in list(agent.fetches):
            objects.stop_fetch(agent, name)
        agent.zygotes.close()
        agent.scratch.remove()
        agent.poller.close()
        agent.link.dealer.close(linger_s=0.3)
        signal.set_wakeup_fd(-1)
        log.info("the pilot has ended: %s", agent.state.leaving)


# ---- commands


def execute_command(agent: Agent, command: commands.Command) -> None:
    match command:
        case (
            commands.SendToManager() | commands.SendPieces() | commands.SendHeartbeat() | commands.SendHello()
            | commands.DropAcknowledgedFrames()
        ):  # fmt: skip
            agent.link.execute_command(command)
        case commands.SendToLibrary(library=number, message=to_library):
            process = agent.processes.get(number)
            if process is not None:
                agent.poller.queue_message(process, to_library)
        case commands.WriteLog(text=text, severity=severity):
            log.log(severity, "%s", text)
        case commands.PrepareLibrary(ordered=ordered):
            processes.prepare_library(agent, ordered)
        case commands.PinObjects(library=number, objects=refs):
            objects.pin_objects(agent, number, refs)
        case commands.StartProcess(ordered=ordered, objects=paths, device_memory_bytes=budget_bytes):
            processes.start_process(agent, ordered, dict(paths), device_memory_bytes=budget_bytes)
        case commands.KillProcess(library=number):
            processes.kill_library_process(agent, number)
        case commands.KillZygote(library=number):
            processes.kill_zygote(agent, number)
        case commands.RemoveLibrary(library=number, ran=ran):
            processes.remove_library(agent, number, ran)
        case commands.ObserveLibrary(library=number):
            observing.report_observations(agent, filter(None, [agent.processes.get(number)]))
        case commands.InspectOffer(order=order):
            agent.handle_event(agent.offer_inspector.inspect(order))
        case commands.AnnounceFetch(name=name):
            agent.peers.served_cache.announce_fetch(name)
        case commands.StartFetch(order=order):
            objects.start_or_update_fetch(agent, order)
        case commands.StopFetch(name=name):
            objects.stop_fetch(agent, name)
        case commands.RemoveEvictedSnapshots():
            store.remove_evicted_snapshots(agent.cache)
        case commands.FetchArguments():
            objects.fetch_arguments(agent, command)
        case commands.ReleaseArguments(library=number, calls=calls):
            objects.release_arguments(agent, number, calls)
        case commands.UploadResults(library=number, ends=ends):
            objects.upload_results(agent, number, ends)
        case commands.OfferSnapshot(recipe=recipe, made=made):
            objects.offer_snapshot(agent, recipe, made)
        case commands.ProbeDevice(device=device):
            observing.begin_probe(agent, device)
        case commands.SetTimer(at=at, key=key):
            agent.timers.set_timer(at, key)
        case commands.ExitPilot():
            agent.must_exit = True
        case _:
            assert_never(command)
