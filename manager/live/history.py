"""What loads and runs have cost before, by context and device kind: asked by the core, kept across sessions."""

from __future__ import annotations

from stoker.contexts.performance import PerformanceStore
from stoker.contexts.state import state_folder
from stoker.manager.core.commands import AskAdvice, RecordLoad, RecordRuns
from stoker.manager.core.events import AdviceArrived, ContextAdvice


class History:
    """The user's performance store. Where it cannot be opened it says so once and knows nothing."""

    def __init__(self) -> None:
        self._store = PerformanceStore(state_folder() / "performance.sqlite")

    def record(self, command: RecordLoad | RecordRuns) -> None:
        """Remember a cost. Runs are remembered as the mean of those since the last record."""
        if isinstance(command, RecordLoad):
            self._store.record_load(
                command.recipe,
                kind=command.kind,
                load_s=command.load_s,
                start_s=command.start_s,
                resident_bytes=command.resident_bytes,
                peak_bytes=command.peak_bytes,
                device_bytes=command.device_bytes,
            )
        elif command.calls:
            mean = command.run_s / command.calls
            self._store.record_runs(command.recipe, kind=command.kind, function=command.function, run_s=[mean])

    def answer(self, ask: AskAdvice) -> AdviceArrived | None:
        """What is known of a context, or None."""
        known = self._store.estimates(ask.recipe)
        if not known:
            return None
        by_kind = {
            kind: ContextAdvice(
                load_s=e.load_s + e.start_s,
                load_sd_s=e.load_sd,
                resident_bytes=e.device_bytes or e.resident_bytes,
                peak_bytes=e.peak_bytes,
                run_s=e.run_s,
                run_sd_s=e.run_sd,
            )
            for kind, e in known.items()
        }
        return AdviceArrived(ask.recipe, by_kind)

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()
