from __future__ import annotations

import pkgutil
import tomllib
from pathlib import Path

import stoker

ROOT = Path(__file__).parents[2]


def test_applications_may_import_only_the_public_modules():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    contract = next(one for one in contracts if one.get("source_modules") == ["stoker.apps"])
    forbidden = {one.removeprefix("stoker.") for one in contract["forbidden_modules"]}
    there = {one.name for one in pkgutil.iter_modules([str(ROOT / "src" / "stoker")])} - {"apps"}
    private = (there - set(stoker._MODULES)) | {f"{one}.*" for one in ("contexts", "tuning")}
    assert forbidden == private, (
        f"pyproject.toml, contract {contract['name']!r}: forbid {sorted(private - forbidden)} to applications (a module"
        f" that is to be public stands in stoker._MODULES), and drop {sorted(forbidden - private)}"
    )
