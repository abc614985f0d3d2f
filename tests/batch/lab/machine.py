"""One machine of the lab as a process: `python -I -S machine.py LOCK LOGS COMMANDS`."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import sys
import time

PR_SET_CHILD_SUBREAPER = 36


class Machine:
    def __init__(self, commands: dict[str, list[str]], *, logs: str) -> None:
        self._commands = commands
        self._logs = logs
        self._running: dict[str, int] = {}

    def obey(self, line: str) -> str:
        word, _, name = line.strip().partition(" ")
        try:
            if word == "crash":
                self.kill_all()
                return "ok"
            if word == "start":
                return f"ok {self._start(name)}"
            pid = self._running.get(name, 0)
            if word == "look":
                return f"ok {pid}"
            if not pid:
                return f"no {name} does not run"
            os.kill(pid, {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "thaw": signal.SIGCONT}[word])
            while word == "kill" and name in self._running:
                self.reap(wait=True)
            return "ok"
        except (OSError, KeyError) as error:
            return f"no {line.strip()}: {type(error).__name__}: {error}"

    def _start(self, name: str) -> int:
        if name in self._running:
            return self._running[name]
        command = self._commands[name]
        log = os.path.join(self._logs, f"{name}.out")
        self._running[name] = os.posix_spawnp(
            command[0],
            command,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGCHLD],
        )
        return self._running[name]

    def reap(self, *, wait: bool = False) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, 0 if wait else os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            wait = False
            self._running = {name: running for name, running in self._running.items() if running != pid}

    def kill_all(self) -> None:
        """Kill child processes until no child is left; some children start while others die."""
        until = time.monotonic() + 10
        while (pids := below(os.getpid())) and time.monotonic() < until:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.005)
            self.reap()
        self.reap()


def below(top: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    todo = [top]
    while todo:
        mine = children.get(todo.pop(), [])
        found += mine
        todo += mine
    return found


def serve(machine: Machine) -> None:
    news, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    kept = b""
    while True:
        ready, _, _ = select.select([0, news], [], [])
        if news in ready:
            os.read(news, 4096)
            machine.reap()
        if 0 in ready:
            heard = os.read(0, 4096)
            if not heard:
                return
            *lines, kept = (kept + heard).split(b"\n")
            for line in lines:
                os.write(1, machine.obey(line.decode()).encode() + b"\n")


def main() -> None:
    lock, logs, commands = sys.argv[1:]
    os.umask(0o022)  # the usual umask of daemons
    fcntl.flock(os.open(lock, os.O_RDONLY), fcntl.LOCK_SH)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    machine = Machine(json.loads(commands), logs=logs)
    try:
        os.write(1, b"ok\n")
        serve(machine)
    finally:
        machine.kill_all()


if __name__ == "__main__":
    main()
