"""The factory's end of the connection to the manager: a client that carries out orders for blocks.

What it says changes the manager's records, so that it travels in numbered frames, which are kept until they are
acknowledged. After every (re)connect the hello goes first, then those frames again, in order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from uuid import uuid4

from stoker.dealer import Dealer, Keys
from stoker.errors import ProtocolError, SessionError
from stoker.log_files import SeldomLog
from stoker.manager.factory.keeper import FactoryUpdate
from stoker.protocol import to_client, to_manager, wire
from stoker.protocol.session import SessionFolder
from stoker.protocol.wire import Outbox

log = logging.getLogger("stoker.factory")


class FactoryLink:
    """The connection (`dealer`), what goes over it, and the outbox."""

    def __init__(self, folder: SessionFolder) -> None:
        self._folder = folder
        self.session = folder.read()
        self._outbox = Outbox()
        self._refusals = SeldomLog(log)
        self._decode = wire.to_client_decoder()
        pair = folder.read_key("client")
        self.dealer = Dealer(
            self.session.address,
            name=f"factory-{uuid4().hex[:12]}",
            keys=Keys(self.session.server_key, pair.public, pair.secret),
            log=log,
        )

    def came_back(self) -> bool:
        """Take note of connection events; whether there is a new connection, on which to `greet`.

        Raises SessionError when the manager does not take our key.
        """
        failed = self.dealer.failed_handshakes
        fresh = self.dealer.came_back()
        if failed == 0 < self.dealer.failed_handshakes and not self.dealer.refused:
            log.warning("who listens at %s is not the session's manager, or is just ending", self.dealer.address)
        if self.dealer.refused:
            raise SessionError(
                f"the manager of session {self.session.session} refused this factory's key; "
                f"is {self._folder.path} the session's own folder?"
            )
        return fresh

    def greet(self) -> None:
        """Say hello, then everything that was not acknowledged."""
        hello = to_manager.ClientHello(
            wire.VERSION, self.session.session, observer=True, factory=True, acknowledged=self._outbox.acknowledged
        )
        for frame in [wire.encode([hello]), *self._outbox.unacked()]:
            self.dealer.send(frame)

    def receive(self) -> list[to_client.ToClient]:
        """All messages that have come."""
        out: list[to_client.ToClient] = []
        for data in self.dealer.receive():
            try:
                out += self._decode(data).messages
            except ProtocolError as error:
                self._refusals.warning("manager", f"refused a frame of the manager: {error}")
        return out

    def tell(self, messages: Iterable[FactoryUpdate]) -> None:
        """Say things that must arrive: now, or when there is a connection."""
        batch = list(messages)
        if batch:
            sequence = self._outbox.next()
            frame = wire.encode(batch, sequence=sequence)
            self._outbox.keep(sequence, frame)
            if self.dealer.connected:
                self.dealer.send(frame)

    def acked(self, sequence: int) -> None:
        """The manager has frames up to this number for good."""
        self._outbox.acked(sequence)

    def refresh_address(self) -> None:
        """While the manager is away: one that was started again may listen elsewhere. Go where its file says."""
        try:
            address = self._folder.read().address
        except SessionError as error:  # the file is being replaced, or the file system is away: look again later
            log.debug("session file: %s", error)
            return
        self.dealer.move_to(address)
