"""What docs/workloads.md shows is read as it says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
from sim.worlds import model, source, world

from stoker.config import read_unit
from stoker.manager.core.nouns import Call
from stoker.manager.core.seams import Action, View
from stoker.manager.policies import HottestFirst, default_policies
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.workload import TraceFormat, Workload
from stoker.protocol.ids import LibraryId

TEXT = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()


def test_its_examples_are_workloads() -> None:
    examples = re.findall(r"^```toml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        msgspec.convert(tomllib.loads(example)["workload"], Workload, dec_hook=read_unit)  # type: ignore[call-overload]


def test_it_has_every_kind_every_format_and_every_setting() -> None:
    kinds = {kind.__struct_config__.tag for kind in Workload.__args__}
    formats = {format.value for format in TraceFormat}
    settings = {field.encode_name for kind in Workload.__args__ for field in msgspec.structs.fields(kind)}
    assert kinds | formats | settings <= set(re.findall(r"\w+", TEXT))
    told = {name for row in re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert told <= kinds | formats | settings | {"kind"}


def test_lengths_are_told_to_policies_and_change_no_time() -> None:
    short = [Arrival(float(n), "llm", input_length=1) for n in range(20)]
    long = [msgspec.structs.replace(each, input_length=10_000, expected_output=5_000) for each in short]
    heard: list[int] = []

    class Listens(HottestFirst):
        def place(self, view: View, call: Call) -> LibraryId | Action | None:
            assert call.spec.features is not None
            heard.append(call.spec.features.input_length)
            return super().place(view, call)

    def ends(arrivals: list[Arrival]) -> float:
        made = msgspec.structs.replace(default_policies(), dispatch=Listens())
        return Simulation(world(source(1), model()), iter(arrivals), made, seed=0).run().ended_at

    assert ends(short) == ends(long)
    assert set(heard) == {1, 10_000}
