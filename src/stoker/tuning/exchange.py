"""The connections between the ranks of a gang, and the sums that the ranks exchange.

The ranks connect to a store that rank 0 serves at the rendezvous (`gang_store`). Each rank writes an identifier of its
job, so that two gangs at one address get an error instead of wrong sums. The ranks then form a process group of
torch.distributed (Gloo on CPUs, NCCL on GPUs). The default group is not used, because two calls in one library would
share it. Sums are 64-bit numbers. Every rank receives identical bits.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed

from stoker.connections import join_address, split_address
from stoker.errors import ConfigError, GangBroken
from stoker.pilot.transfer.wire import PeerError
from stoker.tuning import gang_store
from stoker.units import show_seconds

log = logging.getLogger(__name__)

_LAST_WAIT_LIMIT_S = 5.0
_CONNECT_AGAIN_AFTER_S = 0.05


class ExchangeError(GangBroken):
    """The ranks of a gang did not connect, or a rank was lost. Its facts are `rank`, `size` and `rendezvous`."""


class Exchange:
    """The connection of a rank to the other ranks of its gang. All ranks must call its methods in the same order."""

    def __init__(self, *, rank: int, size: int, where: str = "", store: Any = None, group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._where = where
        self._store = store
        self._group = group
        self._broadcast_count = 0

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Replace `values` (64-bit, equal shape on all ranks) by their sum. Raises ExchangeError if a rank is lost."""
        if self.size > 1:
            try:
                self._group.allreduce([values]).wait()
                if values.is_cuda:
                    torch.cuda.synchronize(values.device)
            except RuntimeError as error:
                raise self._make_error(f"lost a rank in the exchange of gradients ({_first_line(error)})") from error
        return values

    def broadcast(self, data: bytes, *, limit_s: float | None = None) -> bytes:
        """Send the data of rank 0 to every rank, and return it. `limit_s`: maximum wait in seconds. Raises
        ExchangeError if rank 0 is lost.
        """
        if self.size == 1:
            return data
        name = f"shared/{self._broadcast_count}"
        self._broadcast_count += 1
        try:
            if self.rank == 0:
                self._store.set(name, data)
                return data
            if limit_s is not None:
                self._store.wait([name], datetime.timedelta(seconds=limit_s))
            return bytes(self._store.get(name))
        except RuntimeError as error:
            raise self._make_error(f"did not get the shared values from rank 0 ({_first_line(error)})") from error

    def finish(self) -> None:
        """Report that this rank is done. Rank 0 waits up to 5 s for the other ranks."""
        if self.size == 1:
            return
        try:
            self._store.set(f"done/{self.rank}", "")
            if self.rank == 0:
                names = [f"done/{rank}" for rank in range(self.size)]
                self._store.wait(names, datetime.timedelta(seconds=_LAST_WAIT_LIMIT_S))
        except RuntimeError as error:
            log.warning("rank %d: other ranks did not report that they are done: %s", self.rank, _first_line(error))

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.shutdown()
        self._store.close()

    def _make_error(self, what: str) -> ExchangeError:
        return ExchangeError(
            f"rank {self.rank} of {self.size} {what}; if the job is started again, it continues from its"
            " last checkpoint",
            rank=self.rank, size=self.size, rendezvous=self._where,
        )  # fmt: skip


@contextlib.contextmanager
def connect_ranks(
    *,
    rank: int,
    size: int,
    rendezvous: str,
    job: str,
    device: str,
    limit_s: float,
    listener: socket.socket | None = None,
    key: bytes = b"",
) -> Iterator[Exchange]:
    """Connect the ranks of a gang while the `with` block runs. `rendezvous`: `host:port` of rank 0. `job`: digest of
    the job, equal on all ranks. `device`: PyTorch's name of the device. `limit_s`: maximum seconds to wait for other
    ranks. `listener`: socket of rank 0, closed at the end. `key`: secret that all ranks share. Raises ConfigError for
    an invalid rank or address, ExchangeError if other ranks do not join or have another job.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of {size}: ranks count from 0 and are less than the size")
    if size == 1:
        yield Exchange(rank=0, size=1)
        return
    try:
        host, port = split_address(rendezvous)
    except ValueError:
        why = "is not an address; write host:port, as in 10.0.0.7:29500"
        raise ConfigError(f"rendezvous {rendezvous!r} {why}") from None
    began = time.monotonic()
    met = _open_rank_store(host, port, rank=rank, size=size, key=key, limit_s=limit_s, listener=listener)
    try:
        _check_all_ranks(
            met, rank=rank, size=size, where=rendezvous, job=job, limit_s=limit_s - (time.monotonic() - began)
        )
        group = _create_process_group(met, rank=rank, size=size, device=device, host=host, port=port, limit_s=limit_s)
    except ExchangeError:
        met.close()
        raise
    except RuntimeError as error:
        met.close()
        raise ExchangeError(
            f"rank {rank} of {size} has met the other ranks at {rendezvous}, but cannot connect to them:"
            f" {_first_line(error)}; check that the machines reach each other on every port",
            rank=rank, size=size, rendezvous=rendezvous,
        ) from error  # fmt: skip
    exchange = Exchange(rank=rank, size=size, where=rendezvous, store=met, group=group)
    try:
        yield exchange
        # Skip this after an error: if a rank was lost, `finish` would wait for that rank again.
        exchange.finish()
    finally:
        exchange.close()


def _open_rank_store(
    host: str, port: int, *, rank: int, size: int, key: bytes, limit_s: float, listener: socket.socket | None
) -> gang_store.RankStore:
    ends_at = time.monotonic() + limit_s
    try:
        if rank == 0:
            return gang_store.serve_store(listener or _listen(host, port), key=key, limit_s=limit_s)
        while True:
            try:
                return gang_store.connect_to_store(join_address(host, port), key=key, limit_s=limit_s)
            except PeerError:
                if time.monotonic() + _CONNECT_AGAIN_AFTER_S >= ends_at:
                    raise
                time.sleep(_CONNECT_AGAIN_AFTER_S)
    except (OSError, PeerError) as error:
        what = "cannot serve the rendezvous" if rank == 0 else "did not find rank 0"
        do = "give a free port of this machine" if rank == 0 else "is rank 0 running, and is the address right?"
        within = f" within {show_seconds(limit_s)}" if rank else ""
        raise ExchangeError(
            f"rank {rank} of {size} {what} at {host}:{port}{within}: {_first_line(error)}; {do}",
            rank=rank, size=size, rendezvous=f"{host}:{port}",
        ) from error  # fmt: skip


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=both)


def _check_all_ranks(store: Any, *, rank: int, size: int, where: str, job: str, limit_s: float) -> None:
    """Raise ExchangeError unless each rank has joined exactly once, with the same job."""
    facts: dict[str, Any] = {"rank": rank, "size": size, "rendezvous": where}
    mine = f"{job}/{size}"
    again = "start the gang again at an address of its own"
    try:
        if store.add(f"hands/{rank}", 1) > 1:
            raise ExchangeError(f"rank {rank} of {size} has already joined at {where}; {again}", **facts)
        store.set(f"here/{rank}", mine)
        store.wait([f"here/{each}" for each in range(size)], datetime.timedelta(seconds=max(0.1, limit_s)))
        theirs = [bytes(store.get(f"here/{each}")).decode() for each in range(size)]
        with contextlib.suppress(RuntimeError):  # rank 0 may already have disconnected
            store.set(f"read/{rank}", "")
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {rank} of {size} waited {show_seconds(limit_s)} at {where}: "
            f"{_describe_absent_ranks(store, size=size)}; {again}",
            **facts,
        ) from error
    if strangers := [str(each) for each, said in enumerate(theirs) if said != mine]:
        if rank == 0:  # disconnect last, because the other ranks find the mismatch in the store that rank 0 serves
            with contextlib.suppress(RuntimeError):
                reads = [f"read/{each}" for each in range(size)]
                store.wait(reads, datetime.timedelta(seconds=_LAST_WAIT_LIMIT_S))
        raise ExchangeError(
            f"rank {rank} of {size} found ranks of another job or gang at {where} (rank"
            f" {', '.join(strangers)}); {again}",
            **facts,
        )


def _describe_absent_ranks(store: Any, *, size: int) -> str:
    try:
        late = [str(each) for each in range(size) if not store.check([f"here/{each}"])]
    except RuntimeError:
        return "rank 0, which serves the rendezvous, has disconnected"
    return f"rank{'s' if len(late) > 1 else ''} {', '.join(late)} did not connect"


def _create_process_group(
    store: Any, *, rank: int, size: int, device: str, host: str, port: int, limit_s: float
) -> Any:
    limit = datetime.timedelta(seconds=limit_s)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = limit
        return distributed.ProcessGroupNCCL(distributed.PrefixStore("nccl", store), rank, size, options)
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    options._threads = 1
    # By default Gloo listens at the address of this machine's host name, which other ranks may be unable to reach, or
    # which strangers can reach. Listen at the address on the route to rank 0 instead.
    options._devices = [gloo.create_device(hostname=_own_address(host, port))]
    return gloo(distributed.PrefixStore("gloo", store), rank, size, options)


def _own_address(host: str, port: int) -> str:
    """Return this machine's address on the route to the rendezvous. This function sends no data."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
