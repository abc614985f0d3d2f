"""One side of `concurrent_requests`: sends all requests at once to one library with several slots, and prints JSON.

python -m benchmarks.concurrent_requests_side --slots 32 --calls 100 1000 10000 --request-ms 50
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time

import stoker
from stoker.site import Pilot, Site


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--slots", type=int, default=32)
    ask.add_argument("--calls", type=int, nargs="+", default=[100, 1000, 10_000])
    ask.add_argument("--request-ms", type=float, default=50.0, help="what a request waits for; 0: it does nothing")
    asked = ask.parse_args()
    request_s = asked.request_ms / 1000

    @stoker.context(slots=asked.slots, memory="200 MB")
    def engine() -> float:
        return request_s

    @stoker.app(context=engine())
    def request(seconds: float, number: int) -> float:
        del number
        began = time.perf_counter()
        if seconds:
            time.sleep(seconds)
        return time.perf_counter() - began

    site = Site(pilot=Pilot(devices="cpu:1", max_blocks=1))
    own_ms = {}
    with (
        tempfile.TemporaryDirectory(prefix="concurrent-") as folder,
        stoker.load(site, run_dir=folder, strategy="none", initialize_logging=False),
    ):
        list(stoker.map(request, range(4 * asked.slots)))
        for calls in asked.calls:
            began = time.perf_counter()
            took = list(stoker.map(request, range(calls), window=calls))
            wall_s = time.perf_counter() - began
            rounds = math.ceil(calls / asked.slots) if request_s else calls
            own_ms[calls] = 1000 * (wall_s - rounds * sum(took) / calls) / calls
    print(json.dumps({"own_ms": own_ms}))


if __name__ == "__main__":
    main()
