"""Run the same sequences over all shells of a pilot core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance.agent import RealAgent
from conformance.core_alone import CoreAlone
from conformance.pooled import Pooled
from conformance.sequences import AGENT, POOL, SEQUENCES, SIMULATED, Sequence
from conformance.shell import Shell
from conformance.simulated import Simulated

CORE = "core"
NAMES = [one.name for one in SEQUENCES]


class SharedAgent:
    """One pilot for all sequences that do not end the pilot, replaced after a failure."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._shell: RealAgent | None = None

    def play(self, sequence: Sequence) -> None:
        shell = self._shell = self._shell or RealAgent(self._folders.mktemp("agent"))
        try:
            sequence.run(shell)
            shell.finish()
            shell.unread.clear()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        shell, self._shell = self._shell, None
        if shell:
            shell.close()


@pytest.fixture(scope="module")
def shared_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedAgent]:
    shared = SharedAgent(tmp_path_factory)
    yield shared
    shared.close()


def play(shell: Shell, sequence: Sequence) -> None:
    try:
        sequence.run(shell)
        if not sequence.ends_pilot:
            shell.finish()
    finally:
        shell.close()


def expressible(sequence: Sequence, name: str) -> None:
    if name in sequence.without:
        pytest.skip(sequence.without[name])


def new_shell(name: str, walltime_s: float) -> Shell:
    match name:
        case "core":
            return CoreAlone(walltime_s=walltime_s)
        case "simulator":
            return Simulated(walltime_s=walltime_s)
        case _:
            return Pooled()


@pytest.mark.parametrize("name", [CORE, SIMULATED, POOL])
@pytest.mark.parametrize("sequence", SEQUENCES, ids=NAMES)
def test_core_simulator_and_pool_pass_every_conformance_sequence(sequence: Sequence, name: str) -> None:
    expressible(sequence, name)
    play(new_shell(name, sequence.walltime_s), sequence)


@pytest.mark.parametrize("sequence", [one for one in SEQUENCES if not one.ends_pilot], ids=lambda one: one.name)
def test_shared_pilot_agent_passes_sequences_that_keep_it_running(
    sequence: Sequence, shared_agent: SharedAgent
) -> None:
    expressible(sequence, AGENT)
    shared_agent.play(sequence)


@pytest.mark.parametrize("sequence", [one for one in SEQUENCES if one.ends_pilot], ids=lambda one: one.name)
def test_new_pilot_agent_passes_each_sequence_that_ends_a_pilot(sequence: Sequence, tmp_path: Path) -> None:
    expressible(sequence, AGENT)
    play(RealAgent(tmp_path, walltime_s=sequence.walltime_s), sequence)


def test_core_runs_all_sequences_and_other_shells_skip_few() -> None:
    shells = {CORE, AGENT, SIMULATED, POOL}
    left_out = [(one.name, name) for one in SEQUENCES for name in one.without]
    assert {name for _, name in left_out} <= shells - {CORE}
    assert all(reason for one in SEQUENCES for reason in one.without.values())
    assert len(left_out) * 8 <= len(SEQUENCES) * len(shells)
