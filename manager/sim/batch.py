"""A simulated batch system and its factory.

A block waits for a random time, then for capacity, in order of submission. If the capacity shrinks, running blocks are
preempted without notice. The manager detects broken connections soon, but learns of the preemption at the next poll.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.chance import Stream
from stoker.manager.core.events import PilotCut, PilotLost
from stoker.manager.sim.agenda import AgendaEntry, cancel_entry
from stoker.manager.sim.log import LoggedEvent
from stoker.manager.sim.pilot import PilotSimulationBase, SimPilot
from stoker.manager.sim.world import Preempt, SourceModel
from stoker.protocol.blocks import BlockOrder, BlockPhase, LossReason, Source
from stoker.protocol.ids import BlockId
from stoker.protocol.to_manager import BlockUpdate

_LOSSES = {"preempted": LossReason.PREEMPTED, "walltime": LossReason.WALLTIME}


@dataclass(slots=True, eq=False)
class _BatchJob:
    id: BlockId
    ordinal: int
    pilots: dict[SimPilot, None] = field(default_factory=dict)
    is_running: bool = False
    is_over: bool = False
    end_entry: AgendaEntry | None = None


class SimulatedBatchSystem:
    def __init__(self, sim: PilotSimulationBase, model: SourceModel, *, number: int, seed: int) -> None:
        self.model = model
        self._sim = sim
        self._number = number
        self._waits = Stream(seed, f"wait/{model.name}")
        self._boots = Stream(seed, f"boot/{model.name}")
        self._jobs: dict[BlockId, _BatchJob] = {}
        self._queue: dict[BlockId, _BatchJob] = {}
        self._running: dict[BlockId, _BatchJob] = {}
        self._capacity = 0
        self._submitted = 0
        for at_s, blocks in model.steps:
            sim.agenda.schedule_at(at_s, self._set_capacity, blocks)

    @property
    def source(self) -> Source:
        model = self.model
        return Source(
            name=model.name, rule=model.rule, first=model.init_blocks, least=model.min_blocks, most=model.max_blocks,
            keep_pending=model.keep_pending, idle_s=float(model.idle_s), finish_within_s=float(model.finish_within_s),
            nodes=model.nodes, walltime_s=float(model.walltime_s), slots=model.devices, kind=model.kind,
        )  # fmt: skip

    def submit(self, order: BlockOrder) -> None:
        job = self._jobs[order.block] = _BatchJob(order.block, self._submitted)
        self._submitted += 1
        self._log_event(LoggedEvent.BLOCK_ASKED, job)
        self._send_update(job, BlockPhase.PENDING, "Resources")
        model = self.model
        wait_s = model.wait_s * self._waits.lognormal_factor(job.ordinal, cv=model.wait_cv)
        self._sim.agenda.schedule_after(wait_s, self._enqueue, job)

    def cancel(self, block: BlockId) -> None:
        job = self._jobs.get(block)
        if job is not None:
            self._end_job(job, "cancelled")

    def _enqueue(self, job: _BatchJob) -> None:
        if not job.is_over:
            self._queue[job.id] = job
            self._start_queued_jobs()

    def _set_capacity(self, blocks: int) -> None:
        self._capacity = blocks
        self._sim.log.add_row(self._sim.agenda.now, LoggedEvent.CAPACITY, block=self._number, value=float(blocks))
        while len(self._running) > self._capacity:
            newest = self.model.preempt is Preempt.NEWEST
            job = next(reversed(self._running.values()) if newest else iter(self._running.values()))
            self._end_job(job, "preempted")
        self._start_queued_jobs()

    def _start_queued_jobs(self) -> None:
        while self._queue and len(self._running) < self._capacity:
            self._start_job(self._queue.pop(min(self._queue, key=lambda id: self._queue[id].ordinal)))

    def _start_job(self, job: _BatchJob) -> None:
        sim, model = self._sim, self.model
        job.is_running = True
        self._running[job.id] = job
        self._log_event(LoggedEvent.BLOCK_STARTED, job)
        self._send_update(job, BlockPhase.RUNNING, "")
        ends_at = 0.0
        if model.walltime_s:
            ends_at = sim.agenda.now + model.walltime_s
            job.end_entry = sim.agenda.schedule_at(ends_at, self._end_job, job, "walltime")
        for node in range(model.nodes):
            pilot = sim.create_pilot(model, block=job.id, ends_at=ends_at)
            job.pilots[pilot] = None
            boot_s = model.boot_s * self._boots.lognormal_factor(job.ordinal * model.nodes + node, cv=model.boot_cv)
            sim.agenda.schedule_after(boot_s, pilot.connect)

    def forget_ended_pilot(self, pilot: SimPilot) -> None:
        job = self._jobs.get(BlockId(pilot.block))
        if job is not None and not job.is_over:
            job.pilots.pop(pilot, None)
            if not job.pilots:
                self._end_job(job, "done")

    def _end_job(self, job: _BatchJob, reason: str) -> None:
        if job.is_over:
            return
        job.is_over = True
        sim = self._sim
        cancel_entry(job.end_entry)
        del self._jobs[job.id]
        self._queue.pop(job.id, None)
        self._running.pop(job.id, None)
        self._log_event(LoggedEvent.BLOCK_OVER, job)
        for pilot in list(job.pilots):
            if pilot.is_running:
                pilot.end_silently()
                sim.agenda.schedule_after(sim.world.delays.message_s, sim.handle, PilotCut(pilot.id))
                sim.agenda.schedule_after(
                    sim.world.delays.back_s, sim.handle, PilotLost(pilot.id, f"{job.id}: {reason}")
                )
        self._send_update(job, BlockPhase.ENDED, reason)
        if job.is_running:
            self._start_queued_jobs()

    def _send_update(self, job: _BatchJob, phase: BlockPhase, reason: str) -> None:
        late_s = self._sim.world.delays.poll_s
        update = BlockUpdate(job.id, phase, f"job-{job.id}", reason, loss=_LOSSES.get(reason))
        self._sim.agenda.schedule_after(late_s, self._sim.send_block_update, update)

    def _log_event(self, what: LoggedEvent, job: _BatchJob) -> None:
        self._sim.log.add_row(self._sim.agenda.now, what, block=int(job.id[1:]))
