"""Ranks as processes, forked from a server that has done their imports."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from free_port import free_port
from polling import PATIENCE_S, polls

from stoker.contexts.ambient import Evicted

LIMIT_S = 120.0


class Ranks:
    """A running gang: one process and pipe per rank."""

    def __init__(self, processes: Sequence[BaseProcess], pipes: Sequence[Connection]) -> None:
        self.processes = processes
        self._pipes = pipes

    def answers(self) -> list[Any]:
        """Return each rank's result or exception; None for a killed rank."""
        return [_answer(pipe) for pipe in self._pipes]

    def first(self, ranks: Sequence[int]) -> Any:
        """Return the result or exception of the first process to end."""
        ended = wait([self._pipes[rank] for rank in ranks], LIMIT_S)
        return _answer(ended[0]) if ended else None


@contextmanager
def gang(function: str, specs: Sequence[dict[str, Any]]) -> Iterator[Ranks]:
    """Run the named function of this module in one process per spec. All processes end with the block."""
    with pytest.MonkeyPatch.context() as patch:
        # the fork server, which the first gang starts, needs this path
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        start = multiprocessing.get_context("forkserver")
        start.set_forkserver_preload(["tuning.preload"])
        pairs = [start.Pipe(duplex=False) for _ in specs]
        processes = [
            start.Process(target=_child, args=(function, spec, pair[1]))
            for spec, pair in zip(specs, pairs, strict=True)
        ]
        for process in processes:
            process.start()
    for _, end in pairs:
        end.close()
    try:
        yield Ranks(processes, [pair[0] for pair in pairs])
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe, _ in pairs:
            pipe.close()


def rendezvous() -> str:
    """Return a free address for rank 0, which listens there seconds later."""
    return f"127.0.0.1:{free_port()}"


def wait_until_served(where: str) -> None:
    host, _, port = where.rpartition(":")
    for more in polls(PATIENCE_S):
        with closing(socket.socket()) as asking:
            if not asking.connect_ex((host, int(port))):
                return
        assert more, f"no process listens at {where}"


def tune(spec: dict[str, Any]) -> Any:
    """Run `tuning.tune` of the tiny model with the spec's options. `die_at`: the forward pass in which the process is
    killed. `leave_at`: the iteration at whose report the process must leave. `checkpoint`: file of the last checkpoint,
    from which the job continues.
    """
    from tuning import tiny

    from stoker.tuning import exchange
    from stoker.tuning.tune import TuningProgress, digest_run
    from stoker.tuning.tune import tune as run

    context, job, samples = tiny.context(), spec.pop("job"), tiny.samples()
    place = {name: spec.pop(name) for name in ("rank", "size", "rendezvous")}
    die_at, leave_at = spec.pop("die_at", 0), spec.pop("leave_at", 0)
    kept = spec.pop("checkpoint", None)
    if kept is not None and kept.exists():
        spec["start"] = kept.read_bytes()
    if die_at:
        kill_in_pass(context.model, die_at)

    def report(progress: TuningProgress) -> None:
        if kept is not None and progress.checkpoint:
            kept.write_bytes(progress.checkpoint)
        if progress.iteration == leave_at:
            raise Evicted(b"")

    whose = digest_run(context, job, samples)
    with exchange.connect_ranks(**place, job=whose, device="cpu", limit_s=spec.pop("limit_s", LIMIT_S)) as others:
        return run(context, job, samples, exchange=others, report=report, **spec)


def gradient(spec: dict[str, Any]) -> Any:
    """Return a batch's gradient, loss and token count, summed over the ranks."""
    import torch
    from tuning import tiny

    from stoker.tuning import encoding, exchange
    from stoker.tuning import passes as tuning_passes
    from stoker.tuning.encoding import encode_prompt, encode_samples
    from stoker.tuning.passes import attach_soft_prompt, embed_tokens

    context, job = tiny.context(), tiny.job()
    rows = encode_samples(context.tokenizer, tiny.samples(13), template=job.data.template)
    vectors = embed_tokens(context.model, encode_prompt(context.tokenizer, job.prompt, longest=0))
    with (
        exchange.connect_ranks(**spec, job="gradient", device="cpu", limit_s=LIMIT_S) as others,
        attach_soft_prompt(context.model, vectors) as soft,
    ):
        mine = encoding.rows_of_rank(rows, rank=others.rank, size=others.size)
        found, loss, tokens = tuning_passes.compute_gradient(soft, mine, micro_batch=0)
        sums = torch.cat([found.flatten().double(), torch.tensor([loss, tokens], dtype=torch.float64)])
        return others.sum_over_ranks(sums).tolist()


def meet(spec: dict[str, Any]) -> Any:
    import torch

    from stoker.tuning import exchange

    with exchange.connect_ranks(**{"job": "numbers", "device": "cpu", "limit_s": LIMIT_S, **spec}) as others:
        return float(others.sum_over_ranks(torch.tensor([float(others.rank + 1)], dtype=torch.float64)))


def meet_twice(spec: dict[str, Any]) -> Any:
    return [meet(spec["first"]), meet(spec["second"])]


def choose(spec: dict[str, Any]) -> Any:
    """Return this rank's initial prompt from the bank in the spec's folder, the number of prompts that the rank scored,
    and the bank's description of the lookup.
    """
    from tuning import tiny

    from stoker.tuning import call, exchange
    from stoker.tuning.bank import build
    from stoker.tuning.order import BankPlace, Order

    counts, scorer = list[int](), build.scorer

    def counting(*given: Any, **more: Any) -> Any:
        score = scorer(*given, **more)
        return lambda texts: counts.append(len(texts)) or score(texts)

    order = Order(tiny.job(initial=""), tiny.samples(), bank=BankPlace(spec.pop("bank"), "tiny"))
    with (
        pytest.MonkeyPatch.context() as patch,
        exchange.connect_ranks(**spec, job="choose", device="cpu", limit_s=LIMIT_S) as others,
    ):
        patch.setattr(build, "scorer", counting)
        found = call.choose_initial_prompt(tiny.context(), order, others, known=None)
    return found.text, sum(counts), found.note


def kill_in_pass(model: Any, number: int) -> None:
    passes = iter(range(1, number + 1))

    def count(*_: Any) -> None:
        if next(passes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    model.model.layers[-1].register_forward_hook(count)


def _child(function: str, spec: dict[str, Any], pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        answer = globals()[function](spec)
    except (Exception, Evicted) as error:
        answer = error
    pipe.send(answer)
    pipe.close()


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(LIMIT_S + 30):
        raise TimeoutError("a rank did not end")
    try:
        return pipe.recv()
    except EOFError:
        return None
