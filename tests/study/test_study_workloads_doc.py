"""What docs/workloads.md shows is read as it says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec

from stoker.config import read_unit
from stoker.manager.sim.workload import TraceFormat, Workload

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
