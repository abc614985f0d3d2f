"""What a queued call costs the manager: bytes of memory, with 64 bytes of arguments, at 200,000 queued.

The calls come as frames of a client (Submit messages of 256), through the decoder of the live loop, into the core with
its default policies and no pilot. Frames are made one at a time and dropped, so that only what the manager keeps is
counted. `resident` is what the process grew by, `traced` what Python's allocator was asked for (tracemalloc, in a
second run).

    python -m benchmarks.engine.memory_per_call [--calls 200000] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import tracemalloc

import psutil

from stoker.contexts.recipe import BARE
from stoker.manager.core.events import FromClient
from stoker.manager.core.reactor import Core
from stoker.manager.policies import default_policies
from stoker.protocol import wire
from stoker.protocol.calls import CallSpec
from stoker.protocol.ids import CallId, ClientId, FunctionKey, RecipeKey
from stoker.protocol.to_manager import ClientHello, DefineFunction, DefineRecipe, Submit

SUBMIT, ARGUMENTS = 256, 64


def fill(core: Core, *, calls: int) -> None:
    decode = wire.from_client()
    client = ClientId("client-ab")
    hello = wire.encode([ClientHello(wire.VERSION, "bench"), DefineRecipe(BARE), _function()])
    core.handle(FromClient(client, 0, decode(hello).messages), 0.0)
    for sequence, start in enumerate(range(0, calls, SUBMIT), start=1):
        numbers = range(start, min(start + SUBMIT, calls))
        specs = [CallSpec(CallId(n), n.to_bytes(ARGUMENTS, "big")) for n in numbers]
        data = wire.encode([Submit(FunctionKey("f"), RecipeKey("bare"), specs)], sequence=sequence)
        frame = decode(memoryview(data))
        core.handle(FromClient(client, frame.sequence, frame.messages), start * 1e-6)
    assert len(core.state.calls) == core.state.contexts["bare"].queue.count == calls


def _function() -> DefineFunction:
    return DefineFunction(FunctionKey("f"), "f", b"code")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--calls", type=int, default=200_000)
    ask.add_argument("--json", action="store_true")
    asked = ask.parse_args()
    process = psutil.Process()
    warm = Core("bench", default_policies())
    fill(warm, calls=SUBMIT)
    del warm
    gc.collect()

    before = process.memory_info().rss
    core = Core("bench", default_policies())
    fill(core, calls=asked.calls)
    gc.collect()
    resident = (process.memory_info().rss - before) / asked.calls
    del core
    gc.collect()

    tracemalloc.start()
    core = Core("bench", default_policies())
    fill(core, calls=asked.calls)
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0] / asked.calls
    tracemalloc.stop()
    if asked.json:
        print(json.dumps({"calls": asked.calls, "resident_bytes_per_call": resident, "traced_bytes_per_call": traced}))
    else:
        print(f"{asked.calls:,} queued: {resident:.0f} bytes resident a call, {traced:.0f} traced")


if __name__ == "__main__":
    main()
