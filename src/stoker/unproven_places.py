"""How many connections may wait to prove their key, and which one gives way to another. Standard library alone.

A stranger may open connections and say nothing. An honest peer proves its key within milliseconds. So no newcomer is
turned away: of too many connections the oldest is cut, of the address that has the most of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class UnprovenPlaces(Generic[K]):
    """The connections that wait to prove their key. One thread at a time."""

    def __init__(self, *, most: int) -> None:
        self.most = most
        self._addresses: dict[K, str] = {}
        self._by_address: dict[str, OrderedDict[K, None]] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: K, *, address: str) -> None:
        """A connection has come from this address."""
        self.remove(connection)
        self._addresses[connection] = address
        self._by_address.setdefault(address, OrderedDict())[connection] = None

    def remove(self, connection: K) -> bool:
        """It has proven its key, or is closed; returns False if it is not known as unproven."""
        address = self._addresses.pop(connection, None)
        if address is None:
            return False
        there = self._by_address[address]
        del there[connection]
        if not there:
            del self._by_address[address]
        return True

    def surplus(self) -> tuple[K, str] | None:
        """The connection that must be cut, and its address; None while there is room. It is forgotten."""
        return self.take_oldest() if len(self) > self.most else None

    def take_oldest(self) -> tuple[K, str]:
        """The oldest connection of the address with the most, and that address. It is forgotten. Raises ValueError when
        there is none."""
        address = max(self._by_address, key=lambda each: len(self._by_address[each]))
        connection = next(iter(self._by_address[address]))
        self.remove(connection)
        return connection, address
