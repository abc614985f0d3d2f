"""No-op calls on a hot context: Stoker against Parsl's HighThroughputExecutor, 2 slots each, paired, fresh processes."""

from __future__ import annotations

from benchmarks.paired import ratios, run_side, spread

SIDE = "benchmarks.noop_side"


def main(pairs: int = 5, calls: int = 10_000) -> list[tuple[str, str, str, str]]:
    """Rows: what, Stoker, HTEX, ratio."""
    rows = []
    data: dict[str, list[float]] = {name: [] for name in ("app", "htex", "map", "seq", "htex_seq", "log", "htex_log")}
    for _ in range(pairs):
        data["app"].append(_rate("stoker", "app", calls))
        data["htex"].append(_rate("htex", "app", calls))
        data["map"].append(_rate("stoker", "map", 10 * calls))
        data["seq"].append(run_side(SIDE, "--executor", "stoker", "--how", "sequential")["p50_ms"])
        data["htex_seq"].append(run_side(SIDE, "--executor", "htex", "--how", "sequential")["p50_ms"])
        data["log"].append(_rate("stoker", "app", calls, "--log"))
        data["htex_log"].append(_rate("htex", "app", calls, "--log"))
    for what, ours, theirs, digits in (
        ("python_app, calls/s", "app", "htex", 0),
        ("stoker.map(batch_size=1), calls/s, against HTEX's python_app", "map", "htex", 0),
        ("sequential python_app, p50 in ms", "seq", "htex_seq", 2),
        ("python_app with Parsl's default logging, calls/s", "log", "htex_log", 0),
    ):
        ratio = spread(ratios(data[ours], data[theirs]), digits=2)
        rows.append((what, spread(data[ours], digits=digits), spread(data[theirs], digits=digits), ratio))
    return rows


def _rate(executor: str, how: str, calls: int, *more: str) -> float:
    found = run_side(SIDE, "--executor", executor, "--how", how, "--calls", str(calls), *more)
    return float(found["calls_per_s"])


if __name__ == "__main__":
    for row in main():
        print(" | ".join(row))
