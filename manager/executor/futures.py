"""The future of one call."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

from stoker.manager.executor.failures import outcome
from stoker.manager.protocol.calls import CallEnd, CallProgress
from stoker.manager.protocol.ids import CallId, show_call

if TYPE_CHECKING:
    from stoker.manager.executor.link import Link


class CallFuture(Future[Any]):
    """A concurrent.futures.Future whose cancellation reaches the manager. `progress` is the call's last report.

    A call that runs can be cancelled too: it is stopped even if that costs its library. Parsl logs
    `parsl_executor_task_id`.
    """

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.progress: CallProgress | None = None
        self.call: CallId | None = None
        self._link = link

    @property
    def parsl_executor_task_id(self) -> str:
        """The call's id as people write it."""
        return "" if self.call is None else show_call(self.call)

    def cancel(self) -> bool:
        """Cancel the call, also when it runs. False if it has ended."""
        if not super().cancel():
            return False
        if self.call is not None:
            self._link.cancel([self.call])
        return True

    def settle(self, end: CallEnd) -> bool:
        """The call has ended."""
        try:
            value = outcome(end, session=self._link.session.session)
        except BaseException as error:
            self._set(None, error)
            error.__traceback__ = None  # its frames are this function's; they would keep the future alive
        else:
            self._set(value, None)
        return False

    def fail(self, call: CallId, error: Exception) -> None:  # noqa: ARG002
        """The call will have no end."""
        self._set(None, error)

    def flush(self) -> None:
        """Nothing: a future is settled at once."""

    def report(self, progress: CallProgress) -> None:
        """The running call says how far it is."""
        self.progress = progress

    def _set(self, value: Any, error: BaseException | None) -> None:
        try:
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)
        except InvalidStateError:  # it was cancelled a moment ago
            pass

    def __repr__(self) -> str:
        return f"<call {self.parsl_executor_task_id or 'not sent'} {self._state.lower()}>"
