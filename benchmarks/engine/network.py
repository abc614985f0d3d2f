"""Make hosts in network namespaces on one switch, each with a link of a given speed. Requires root."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

_CLONE_NEWNET = 0x40000000


def why_not() -> str:
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not there; Debian's iproute2 brings it"
    probe = f"probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if done.returncode:
        return f"no network namespace can be made here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return ""


class Network:
    """`count` hosts from 0, each with a link of `rate` (in `tc` syntax) in both directions."""

    def __init__(self, count: int, *, rate: str) -> None:
        self._rate = rate
        self._mark = f"b{os.getpid()}"
        self._switch = f"{self._mark}-switch"
        self._count = count

    def __enter__(self) -> Network:
        try:
            _run("ip", "netns", "add", self._switch)
            _in(self._switch, "ip", "link", "add", "br0", "type", "bridge")
            _in(self._switch, "ip", "link", "set", "br0", "up")
            for number in range(self._count):
                self._connect_namespace(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*map(self.name, range(self._count)), self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def name(self, number: int) -> str:
        return f"{self._mark}-{number}"

    def address(self, number: int) -> str:
        return f"10.78.{number // 200}.{number % 200 + 1}"

    def command(self, number: int, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name(number), *words]

    def enter(self, number: int) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name(number)}", "rb") as namespace:
            if library.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name(number)}")

    def sent_bytes(self, number: int) -> int:
        return int(_run(*self.command(number, "cat", "/sys/class/net/eth0/statistics/tx_bytes")))

    def isolate(self, *numbers: int) -> None:
        for number in numbers:
            _in(self._switch, "ip", "link", "set", f"v{number}", "type", "bridge_slave", "isolated", "on")

    def _connect_namespace(self, number: int) -> None:
        name, port = self.name(number), f"v{number}"
        _run("ip", "netns", "add", name)
        _in(name, "ip", "link", "set", "lo", "up")
        _in(
            self._switch, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name
        )  # fmt: skip
        _in(self._switch, "ip", "link", "set", port, "master", "br0", "up")
        _in(name, "ip", "address", "add", f"{self.address(number)}/16", "dev", "eth0")
        _in(name, "ip", "link", "set", "eth0", "up")
        for namespace, device in ((name, "eth0"), (self._switch, port)):
            _in(
                namespace, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", self._rate, "burst", "256kb",
                "latency", "60ms",
            )  # fmt: skip


def _in(namespace: str, *words: str) -> None:
    _run("ip", "netns", "exec", namespace, *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
