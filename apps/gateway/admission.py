"""Admission: a request for a model that cannot answer it in time is refused with 503, and told when it could."""

from __future__ import annotations

import re

from starlette.requests import Request

from stoker.apps.common.models_file import Cold
from stoker.apps.gateway.failures import TryLater
from stoker.apps.gateway.first_tokens import forecast
from stoker.apps.gateway.served import ServedModel
from stoker.apps.gateway.watch import SessionWatch
from stoker.units import show_seconds

_WAITS = re.compile(r"(?:^|[,;\s])wait=(\d{1,6})(?:$|[,;\s])")
_AGAIN_S = 10.0
"""When a client asks again while the session's journal cannot be written."""
_ASK = "Ask again then, or send the header `Prefer: wait=600` to wait for it"


class Admission:
    """Decides whether a request may begin."""

    def __init__(self, watch: SessionWatch) -> None:
        self._watch = watch

    async def check(self, request: Request, model: ServedModel) -> None:
        """Raise TryLater for a request that would wait longer than its client or the models file wants; and for all
        requests while the session's journal cannot be written, since no call begins or ends then."""
        await self._watch.recent(model)
        if trouble := self._watch.journal_trouble:
            raise TryLater(
                "the session takes no requests just now: its journal cannot be written; the gateway's log says why",
                type="server_error", code="session_unavailable", status=503, retry_after_s=_AGAIN_S, why=trouble,
            )  # fmt: skip
        prefers = _WAITS.search(request.headers.get("prefer", ""))
        waits_s = float(prefers[1]) if prefers else 0.0
        if prefers or model.settings.cold is Cold.REFUSE:
            await self._check_loaded(model, waits_s)
        if objective_s := float(model.settings.ttft):
            await self._check_objective(model, objective_s, waits_s)

    async def _check_loaded(self, model: ServedModel, waits_s: float) -> None:
        facts = await self._watch.recent(model)
        if not facts.hot:  # it may be so by now
            facts = await self._watch.facts(model, within_s=0.1)
        if facts.hot or facts.hot_in_s <= waits_s:
            return
        self._watch.wake(model)
        raise TryLater(
            f"the model {model.name} is {facts.state}; it may answer in {show_seconds(facts.hot_in_s)}. {_ASK}",
            type="overloaded", code="model_cold", status=503, retry_after_s=facts.hot_in_s,
        )  # fmt: skip

    async def _check_objective(self, model: ServedModel, objective_s: float, waits_s: float) -> None:
        facts = await self._watch.recent(model)
        if not facts.hot:
            facts = await self._watch.facts(model, within_s=0.1)
        if not facts.hot and model.settings.cold is Cold.WAIT:
            return
        expected = forecast(facts, model.meter.first)
        later_s = expected.later_s(objective_s)
        if not later_s or expected.first_token_s <= waits_s:
            return
        if not facts.hot:
            self._watch.wake(model)
            later_s = facts.hot_in_s
        raise TryLater(
            f"the model {model.name} would give its first token in {show_seconds(expected.first_token_s)}, and its"
            f" objective is {show_seconds(objective_s)}: {expected.because}. It could be met in"
            f" {show_seconds(later_s)}. {_ASK}",
            type="overloaded", code="objective_unreachable", status=503, retry_after_s=later_s,
        )  # fmt: skip
