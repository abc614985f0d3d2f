"""Batch system faults: ended jobs, hung or dead daemons, lost nodes, failing commands."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from batch.chaos import Stage, Step, Way
from batch.chaos_processes import Processes
from batch.chaos_victims import node_of
from batch.lab.commands import PATH

HANGS_S = (1.0, 5.0)
GONE_S = (1.0, 4.0)
COMMANDS = ("sbatch", "squeue", "scancel", "sacct", "sinfo", "scontrol")
WRAPPER = """#!/bin/sh
mood=$(cat '{mood}' 2>/dev/null)
case "$mood" in
  fail) echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1 ;;
  hang) exec sleep 60 ;;
  late) sleep 2 ;;
  mute) exit 1 ;;
  lies) PATH='{path}' '{real}' "$@" >/dev/null 2>&1
        echo "error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1 ;;
esac
PATH='{path}' exec '{real}' "$@"
"""
MOODS = ("fail", "hang", "late", "mute", "lies")


class Scheduler:
    """Batch system faults. `mood`: the file that controls the wrappers."""

    def __init__(self, stage: Stage, processes: Processes, *, mood: Path) -> None:
        self._stage = stage
        self._cluster = stage.cluster
        self._processes = processes
        self._mood = mood

    def ways(self) -> dict[str, Way]:
        return {
            "preemption": Way(70, self._of_node(self._preempt)),
            "scancel": Way(80, self._of_job("scancel")),
            "requeue": Way(60, self._of_job("scontrol", "requeue")),
            "slurmctld hangs": Way(60, self._freeze_scheduler),
            "slurmctld dies": Way(40, self._kill_scheduler),
            "slurmd dies": Way(60, self._kill_slurmd),
            "drained node": Way(30, self._of_node(lambda step, node: self._state(step, node, "DRAIN"))),
            "node is down": Way(30, self._of_node(lambda step, node: self._state(step, node, "DOWN"))),
            "crashed node": Way(30, self._of_node(self._crash)),
            "commands": Way(250, self._spoil_commands),
        }

    # ---- jobs and nodes whose calls run for the first time

    def _of_node(self, hit: Callable[[Step, str], bool]) -> Callable[[Step], str]:
        def do(step: Step) -> str:
            if not self._is_there():
                return ""
            done = list[bool]()

            def end(pid: int) -> None:
                node = node_of(pid)  # `node_of` returns the head for an ended process
                done.append(node in self._cluster.shape.nodes and hit(step, node))

            found = self._processes.end_pilot(step, end, head=False)
            return found if any(done) else ""

        return do

    def _preempt(self, step: Step, node: str) -> bool:
        wrap = "--wrap=sleep 2"
        said = self._cluster.ask(
            "sbatch", "--partition=main", "--gres=gpu:1", f"--nodelist={node}", "--output=/dev/null", wrap
        )
        return said.returncode == 0

    def _state(self, step: Step, node: str, state: str) -> bool:
        key = f"state of {node}"
        update = ("scontrol", "update", f"NodeName={node}", "Reason=chaos")
        if not self._stage.is_free(key) or self._cluster.ask(*update, f"State={state}").returncode:
            return False
        self._stage.hold(key, step.between(GONE_S), lambda: self._cluster.ask(*update, "State=RESUME"))
        return True

    def _crash(self, step: Step, node: str) -> bool:
        key = f"state of {node}"
        if not self._stage.is_free(key):
            return False
        self._cluster.crash(node)
        self._stage.hold(key, step.between(GONE_S), lambda: self._cluster.start(node))
        return True

    def _of_job(self, *command: str) -> Callable[[Step], str]:
        """Run `command` on the job of a pilot, or on a pending job if no pilot may be hit."""

        def do(step: Step) -> str:
            if not self._is_there():
                return ""
            queue = self._cluster.queue()
            waiting = sorted(
                (int(job), name) for job, name, state, *_ in queue if "stoker" in name and state == "PENDING"
            )
            if waiting and step.length < 0.2 and command[0] == "scancel":
                job, name = step.of(waiting)
                self._cluster.ask(*command, str(job))
                return f"{job} {name}, pending"
            running = {where: (job, name) for job, name, state, _, where, *_ in queue if state == "RUNNING"}
            hit = list[str]()

            def end(pid: int) -> None:
                job, name = running.get(node_of(pid), ("", ""))
                if job and "stoker" in name and self._cluster.ask(*command, job).returncode == 0:
                    hit.append(f"{job} {name}")

            self._processes.end_pilot(step, end, head=False)
            return "".join(hit)

        return do

    # ---- daemons and commands

    def _is_there(self) -> bool:
        return self._stage.is_free("slurmctld")

    def _freeze_scheduler(self, step: Step) -> str:
        if not self._is_there():
            return ""
        self._cluster.freeze("slurmctld")
        self._stage.hold("slurmctld", step.between(HANGS_S), lambda: self._cluster.thaw("slurmctld"))
        return f"for {step.between(HANGS_S):.1f} s"

    def _kill_scheduler(self, step: Step) -> str:
        if not self._is_there():
            return ""
        self._cluster.kill("slurmctld")
        self._stage.hold("slurmctld", step.between(GONE_S), lambda: self._cluster.start("slurmctld"))
        return f"for {step.between(GONE_S):.1f} s"

    def _kill_slurmd(self, step: Step) -> str:
        node = step.of(self._cluster.shape.nodes)
        key = f"state of {node}"
        if not self._stage.is_free(key) or not self._cluster.machines[node].runs("slurmd"):
            return ""
        self._cluster.kill(node)
        self._stage.hold(key, step.between(GONE_S), lambda: self._cluster.start(node))
        return f"{node} for {step.between(GONE_S):.1f} s"

    def _spoil_commands(self, step: Step) -> str:
        if not self._stage.is_free("commands"):
            return ""
        mood = step.of(MOODS)
        self._mood.write_text(mood)
        self._stage.hold("commands", step.between(HANGS_S), lambda: self._mood.write_text(""))
        return f"{mood} for {step.between(HANGS_S):.1f} s"


def wrap(folder: Path, mood: Path) -> str:
    """Write wrappers of the Slurm commands; return a PATH that starts with the wrappers."""
    folder.mkdir()
    mood.write_text("")
    for name in COMMANDS:
        real = subprocess.run(["which", name], capture_output=True, text=True, env={"PATH": PATH}, check=False)
        if real.returncode == 0:
            file = folder / name
            file.write_text(WRAPPER.format(mood=mood, path=PATH, real=real.stdout.strip()))
            file.chmod(0o755)
    return f"{folder}{os.pathsep}{PATH}"
