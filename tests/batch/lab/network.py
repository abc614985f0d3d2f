"""The cables of a cluster whose machines have networks of their own: a bridge on the head, and a cable to each node."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from batch.lab.handle import Handle
from batch.lab.shape import LabError, Place, Shape


def set_up_bridge(head: Handle, nodes: Sequence[Handle], *, shape: Shape, place: Place) -> None:
    """Give every machine its name and its address, and connect them. Raises LabError."""
    hosts = f"mount --bind {place.conf.parent}/hosts /etc/hosts"
    _shell(
        head,
        f"hostname head; {hosts}; ip link set lo up; ip link add br0 type bridge; "
        f"ip addr add {shape.address('head')}/24 dev br0; ip link set br0 up",
    )
    for node in nodes:
        cable = _cable(node.name)
        # made outside, where the process ids of both machines mean something
        _outside(
            "ip",
            "link",
            "add",
            cable,
            "netns",
            head.network,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            node.network,
        )
        _shell(head, f"ip link set {cable} master br0 up")
        _shell(
            node,
            f"hostname {node.name}; {hosts}; ip link set lo up; "
            f"ip addr add {shape.address(node.name)}/24 dev eth0; ip link set eth0 up",
        )


def unplug(head: Handle, node: str) -> None:
    _shell(head, f"ip link set {_cable(node)} down")


def plug_in(head: Handle, node: str) -> None:
    _shell(head, f"ip link set {_cable(node)} up")


def _cable(node: str) -> str:
    return f"v{node}"


def _shell(machine: Handle, script: str) -> None:
    _outside(*machine.inside("sh", "-ec", script))


def _outside(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")
