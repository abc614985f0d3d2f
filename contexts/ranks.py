"""A call's place in its gang: which of its ranks this process is, and where they meet."""

from __future__ import annotations

import socket
from collections.abc import Callable


class Gang:
    """This rank's place. Ranks count from 0 to `size` - 1.

    `rendezvous` is the `host:port` at which rank 0 awaits the others. It is rank 0's to serve: `listener` is a socket
    that listens there already, so nobody else can take the port (None for the other ranks, and in a gang of one). The
    call's end closes it, unless it was `detach`ed. What is said there is the function's own business: a store of
    torch.distributed (`master_listen_fd`), or any other protocol.

    Everybody in the network can connect there. `key` is known to the ranks of this call alone: have each connection
    prove it before anything else is said (for instance with `hmac`).
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        rendezvous: str = "",
        listener: socket.socket | None = None,
        key: bytes = b"",
    ) -> None:
        self.rank = rank
        self.size = size
        self.rendezvous = rendezvous
        self.listener = listener
        self.key = key

    def __repr__(self) -> str:
        where = f" meeting at {self.rendezvous}" if self.rendezvous else ""
        return f"<rank {self.rank} of {self.size}{where}>"

    def close(self) -> None:
        """Stop listening."""
        if self.listener is not None:
            self.listener.close()


SeatHook = Callable[[float], Gang]
"""Takes how many seconds to wait for rank 0's address, and gives the place."""
ALONE = Gang(rank=0, size=1)
"""The place of a call that runs by itself."""
