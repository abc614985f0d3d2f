"""Format numbers from `benchmarks/records` that README and other pages quote."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from typing import Any

import msgspec

from benchmarks.harness import RECORDS, Facts, spread
from benchmarks.tables import Line, Table, row
from benchmarks.tuning import prompt_quality

_HTEX = "python_app, calls/s"
_AHEAD = "the same, calm, and HTEX fetches 1,000 ahead"
_LOGGING = "python_app with Parsl's default logging, calls/s"
_DIRECT = "calls/s, TaskVine direct"
_TASKVINE = ("taskvine-a7c089d", "taskvine")
"""Two records, measured at different commits."""


class BenchRecord(msgspec.Struct, frozen=True):
    """The quoted part of a record of `make bench ARGS="NAME --json FILE"`."""

    facts: Facts
    tables: list[Table]

    def line(self, what: str) -> Line:
        found = [line for table in self.tables for line in table.lines if line.what == what]
        if len(found) != 1:
            raise ValueError(f"{len(found)} lines of {self.facts.command} are called {what!r}, not one")
        return found[0]

    def last(self, what: str) -> list[float]:
        return list(self.line(what).cells.values())[-1]

    def spread(self, what: str) -> str:
        return spread(self.last(what), digits=self.line(what).last_digits)

    @property
    def machine(self) -> str:
        before, after = self.facts.load
        load = f"load average {before:.1f} before and {after:.1f} after"
        return f"{self.facts.machine.rpartition(', Python')[0]}, {load}, {self.facts.at}"


def read(name: str) -> BenchRecord:
    return msgspec.json.decode((RECORDS / f"{name}.json").read_bytes(), type=BenchRecord)


def front_page_rows() -> Iterator[tuple[str, str]]:
    hot = _none_against_full(read("awareness"), "with a snapshot")
    full, alone = (statistics.median(hot.cells[side]) for side in ("full", "below full"))
    inferences, calls = hot.what.split(", ")[2:4]
    begins = "| 384 inferences"
    what = (
        f"{inferences} of SmolLM2-135M on two CPU cores, {calls}: {full:.0f} s with the model kept; {alone:.0f} s with"
        f" a new process per call, {_median_and_range(hot.cells['ratio'])} times as long"
    )
    yield begins, row(what, "`make bench ARGS=awareness`", _record("awareness"))
    _, script_s, first_s, later_s, running_s = _gpu_loads()
    begins = "| load a 4 GB model on an H100"
    what = (
        f"load a 4 GB model on an H100 (1 run): {script_s:.1f} s in a script; {first_s:.1f} s in the first session,"
        f" {later_s:.1f} s in a later one, {running_s:.1f} s in a running session"
    )
    yield begins, row(what, "`make gpu`", _record("gpu-h100-load"))
    noop = read("noop")
    mine, logging = noop.last(_HTEX), noop.last(_LOGGING)
    begins = "| empty calls per second"
    what = (
        f"empty calls per second, against Parsl HTEX: {statistics.median(logging):.1f} times with Parsl's default log;"
        f" {_median_and_range(mine)} without"
    )
    yield begins, row(what, "`make bench ARGS=noop`", _record("noop"))


def _record(name: str) -> str:
    return f"[{name}](benchmarks/records/{name}.json)"


def peer_rows() -> Iterator[tuple[str, str]]:
    noop = read("noop")
    for what, line in (
        ("no-op calls per second through `python_app`, against HTEX, Parsl's own log switched off", _HTEX),
        ("no-op calls per second with Parsl's default logging", _LOGGING),
        ("without the log, both sides' garbage collector tuned, and HTEX fetches 1,000 calls ahead", _AHEAD),
        ("calls per second through `stoker.map`, against HTEX's `python_app`, without the log",
         "stoker.map with batch_size=1, calls/s, against HTEX's python_app"),
        ("one call after another, p50 against HTEX's, without the log", "python_app, one after another, p50 in ms"),
    ):  # fmt: skip
        yield _peer_row(what, "noop", noop, line)
    for record in map(read, _TASKVINE):
        what = f"calls per second, against TaskVine's direct `FunctionCall`, commit {record.facts.commit}"
        yield _peer_row(what, "taskvine", record, _DIRECT)


def lost_rows() -> Iterator[tuple[str, str]]:
    for what, name, lines in (
        ("the manager is killed with 100,000 calls queued: until it works again", "restart",
         ["until it is back at work, s"]),
        ("a pilot is killed, or frozen, while it runs a call: until the call runs on the other one", "lost_pilot",
         ["the pilot is killed", "the pilot is frozen"]),
    ):  # fmt: skip
        record = read(name)
        yield _row(what, name, "; ".join([*(_seconds(record.last(line)) for line in lines), record.machine]))


def preempted_row() -> tuple[str, str]:
    record = read("preemption")
    (line,) = record.tables[0].lines
    done = line.cells["goodput"]
    what = "share of the possible work that is done, while one of 8 pilots is preempted every 5 s"
    return _row(what, "preemption", f"{spread(done, digits=2)}, {len(done)} runs; {record.machine}")


def fidelity() -> tuple[str, str]:
    record = read("fidelity")
    own, lookup = "its own world, 450 inferences, s", "tuning: the lookup on two devices, s"
    before = record.spread("the world of the run before, 450 inferences, s")
    begins = "`make bench ARGS=fidelity`"
    return begins, (
        f"{begins} ({record.machine}; {len(record.last(own))} runs): the forecast of a fact verification"
        f" with 450 inferences has a median error of {record.spread(own)} % if it uses the run's own measurements. With"
        f" those of the previous run, the error is {before} %, because the machine is shared and its speed drifts. For"
        f" a tuning job's lookup on two devices, the error of the forecast from one device is"
        f" {record.spread(lookup)} % in {len(record.last(lookup))} runs."
    )


def awareness() -> Iterator[tuple[str, str]]:
    record = read("awareness")
    begins = "Fact verification with SmolLM2-135M-Instruct in calls of 16 claims"
    yield begins, f"{begins}; `make bench ARGS=awareness`, {record.machine}."
    for which, what in (
        ("with a snapshot", "the model is a snapshot"), ("GGUF as shipped", "the model is the GGUF file as shipped")
    ):  # fmt: skip
        line = _none_against_full(record, which)
        inferences = next(part for part in line.what.split(", ") if part.endswith(" inferences"))
        without, hot = (_figure(line.cells[side], digits=line.digits) for side in ("below full", "full"))
        times, _, between = _figure(line.cells["ratio"], digits=line.last_digits).partition(" ")
        count = len(line.cells["ratio"])
        pairs = "1 pair" if count == 1 else f"{count} pairs"
        found = f"{times} times {between}".strip()
        yield f"| {what}, ", row(f"{what}, {inferences}, {pairs}", f"{hot} s", f"{without} s", found)


def whole_run() -> tuple[str, str]:
    (table,) = read("awareness").tables
    apart, own = (
        spread(line.cells["full / that"], digits=line.last_digits)
        for line in table.lines
        if "full / that" in line.cells
    )
    batches = read("fact_batches")
    slowest = batches.last("the slowest size against the fastest (medians)")[0]
    runs = min(
        len(numbers) for line in batches.tables[0].lines for numbers in line.cells.values() if "claims in" in line.what
    )
    begins = "A whole run takes"
    return begins, (
        f"{begins} {apart} times as long as a load and the same inferences in a hot session, and {own} times as long as"
        " a load and its own time in the model; the bar is 1.05. Of calls of 1, 16 and 256 claims, the slowest size"
        f" takes {slowest:.3f} times as long as the fastest (`make bench ARGS=fact_batches`; medians of {runs} runs"
        " each); the bar is 1.10."
    )


def quality() -> Iterator[tuple[str, str]]:
    found = []
    for place, (_, _, bar) in enumerate(prompt_quality.KINDS):
        middle, low, high = _task_ratio(place)
        judged = "" if bar is None else f"; bar {bar:g}: {'met' if middle >= bar else '**missed**'}"
        found.append((f"{middle:.2f}", f"{low:.2f} to {high:.2f}", judged))
    best, random, induced = (f"{middle} ({between}{judged})" for middle, between, judged in found)
    begins = "Over ten tasks"
    line = (
        f"{begins} (median, 95 % interval) the best of the short list needs {best} of the iterations of the prompt"
        f" that the score chooses, random prompts {random} times as many, and the prompt that the model writes itself"
        f" {induced} times as many."
    )
    yield begins, line
    begins, (times, between, _) = "- **Iterations to a target loss.**", found[1]
    line = (
        f"{begins} A random prompt needs {times} times as many iterations (median of ten tasks, 95 % interval"
        f" {between}). It needs more if tuning teaches the form of a short answer, for example of calculations, and no"
        " more for free text."
    )
    yield begins, line


def chosen_prompt() -> str:
    best, induced = ("{:.2f} ({:.2f} to {:.2f})".format(*_task_ratio(place)) for place in (0, 2))
    return (
        f"the best of 8 needs {best} of the iterations of the one that a score chooses, and an induced one {induced}"
        " times as many: medians of ten tasks, 95 % intervals"
    )


def induced_prompt_text() -> str:
    middle, low, high = _task_ratio(2)
    return (
        f"an induced prompt needs {middle:.2f} times the iterations of the one that a score chooses"
        f" (95 % interval {low:.2f} to {high:.2f}, SmolLM2-135M, `prompt_quality`)"
    )


def _task_ratio(place: int) -> tuple[float, float, float]:
    ratios = read("prompt_quality").last(prompt_quality.KINDS[place][0])
    return statistics.median(ratios), *prompt_quality.interval(ratios)


def communication() -> str:
    shares = read("tuning_times").last("communication, of the time of iterations, two devices")
    told = spread(shares, digits=1)
    return f"communication takes {told} % of iterations (SmolLM2-135M, two processor cores, `tuning_times`)"


def fixed_costs() -> str:
    shares = read("tuning_times").last("fixed costs, of the job, two devices")
    return f"fixed costs {spread(shares, digits=0)} % of the job; {len(shares)} runs"


def prompt_spread() -> str:
    (table,) = read("prompt_quality").tables
    found, task = [], prompt_quality.SPREAD_TASK
    name = prompt_quality.SPREAD_LINE.format(prompt_quality.SPREAD, task)
    for what in (name, f"{name}, between evaluations"):
        (line,) = [line for line in table.lines if line.what == what]
        found.append(prompt_quality.spread_text(line.cells["its ITA"]))
    low, high = prompt_quality.SPREAD_SAID
    return (
        f"{prompt_quality.SPREAD} random prompts of `{task}` need {found[0]} (between evaluations {found[1]}); in"
        f" the paper they are {low} to {high} times the least"
    )


def _figure(numbers: list[float], *, digits: int) -> str:
    return spread(numbers, digits=digits) if len(numbers) > 1 else f"{numbers[0]:,.{digits}f}"


def _none_against_full(record: BenchRecord, which: str) -> Line:
    begins = f"none against full, {which}, "
    (line,) = (line for table in record.tables for line in table.lines if line.what.startswith(begins))
    return line


def _gpu_loads() -> tuple[dict[str, Any], float, float, float, float]:
    """Return a record of `make gpu`, and the seconds until a model can be called: in a script, in a first session, in a
    later session, and in a running session.
    """
    record = json.loads((RECORDS / "gpu-h100-load.json").read_text())
    (load,) = (part["numbers"] for part in record["parts"] if part["name"] == "load")
    script, first, again = (
        load[f"{what}: from nothing to a result, s"] for what in ("a script of its own", "first", "again")
    )
    return record, script, first, again, load["another context of that session: from the call to a result, s"]


def gpu() -> tuple[str, str]:
    record, script_s, first_s, later_s, running_s = _gpu_loads()
    (size,) = (part["numbers"]["bytes"] for part in record["parts"] if part["name"] == "model")
    device, day = record["machine"].partition(",")[0], record["date"].partition(" ")[0]
    begins = "`make gpu` on one"
    return begins, (
        f"{begins} {device}, {day}, one run, with a model of {size / 1e9:.1f} GB (random weights, bfloat16): until the"
        f" model can be called, a script that imports Transformers and loads the model takes {script_s:.1f} s. A"
        f" session takes {first_s:.1f} s the first time, when it copies the files to the pilot's cache, and"
        f" {later_s:.1f} s later. Another context of the same session takes {running_s:.1f} s: its process is forked"
        " from one that has imported everything, and its files are in the cache."
    )


def tuning() -> tuple[str, str]:
    record = read("tuning_times")
    lookup = "tuning: the lookup on two devices, s"
    begins = "A real tuning job (`make bench ARGS=tuning_times`; "
    iterations = record.tables[0].notes[0].split(";")[0]
    runs = len(record.last(lookup))
    return begins, (
        f"{begins}SmolLM2-135M tells even from odd numbers, {iterations}, {runs} runs, {record.machine}) on two devices"
        f" spends {record.spread('communication, of the time of iterations, two devices')} % of the time of its"
        " iterations on communication (the paper: 0.4 to 0.5 % on A100s), and"
        f" {record.spread('fixed costs, of the job, two devices')} % of the job on fixed costs, which include the"
        " lookup and checkpoints (the paper: 37 to 41 % for allocating GPUs). The forecast of its lookup from one"
        f" device was off by {record.spread(lookup)} % in these runs."
    )


def _row(what: str, name: str, *cells: str) -> tuple[str, str]:
    return f"| {what} |", row(what, f"`make bench ARGS={name}`", *cells)


def _seconds(numbers: list[float]) -> str:
    figure, _, between = spread(numbers, digits=2).partition(" ")
    return f"{figure} s {between}, {len(numbers)} runs"


def _peer_row(what: str, name: str, record: BenchRecord, line: str) -> tuple[str, str]:
    figure, _, between = record.spread(line).partition(" ")
    times = "" if "p50" in line else " times"
    return _row(what, name, f"{figure}{times} {between}", record.machine)


def _median_and_range(numbers: list[float]) -> str:
    return f"{statistics.median(numbers):.1f} ({min(numbers):.1f} to {max(numbers):.1f})"
