"""The extractor reads imported modules and config files inside a folder, and no file outside the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stoker.manager.advice.source import reading
from stoker.manager.advice.source.extractor import SourceText, extract_facts
from stoker.manager.advice.source.facts import UNKNOWN, WorkloadFacts


def project(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def facts_of(folder: Path, name: str = "train.py", **options: Any) -> WorkloadFacts:
    source = SourceText((folder / name).read_text(), file=str(folder / name))
    return extract_facts(source, folders=[folder], **options)


GO = "from {} import go\ngo()\n"
PROJECTS: dict[str, dict[str, str]] = {
    "a name": {"train.py": "from sizes import BATCH\nDataLoader(d, batch_size=BATCH)", "sizes.py": "BATCH = 24"},
    "a module": {"train.py": "import sizes as s\nDataLoader(d, batch_size=s.BATCH)", "sizes.py": "BATCH = 24"},
    "all names": {"train.py": "from sizes import *\nDataLoader(d, batch_size=BATCH)", "sizes.py": "BATCH = 24"},
    "all names, both ways": {
        "train.py": "from sizes import *\nDataLoader(d, batch_size=BATCH)",
        "sizes.py": "from others import *\nHERE = 1",
        "others.py": "from sizes import *\nBATCH = 24",
    },
    "packages": {
        "train.py": "import a.b.c\na.b.c.go(24)",
        "a/__init__.py": "",
        "a/b/__init__.py": "",
        "a/b/c.py": "def go(n): f(batch_size=n)",
    },
    "a package that hands on": {
        "train.py": GO.format("a"),
        "a/__init__.py": "from .b import go",
        "a/b.py": "from .c import N\ndef go(): f(batch_size=N)",
        "a/c.py": "N = 24",
    },
    "an import when it runs, above": {
        "train.py": GO.format("a.b.c"),
        "a/b/c.py": "def go():\n    from .. import n\n    f(batch_size=n.N)",
        "a/n.py": "N = 24",
    },
    "a cycle": {
        "train.py": GO.format("one"),
        "one.py": "import two\nN = 24\ndef go(): two.go()",
        "two.py": "import one\ndef go(): f(batch_size=one.N)",
    },
}


@pytest.mark.parametrize("name", PROJECTS)
def test_facts_are_read_from_imported_modules(tmp_path: Path, name: str):
    found = facts_of(project(tmp_path, PROJECTS[name]))
    assert found.batch_size is not None, found.notes
    assert found.batch_size.value == 24
    assert found.notes == ()


CONFIGS = {
    "c.json": ('{"train": {"batch_size": 48}}', "import json\nwith open('c.json') as f:\n    c = json.load(f)\n"),
    "c.toml": ("[train]\nbatch_size = 48\n", "import tomllib\nc = tomllib.load(open('c.toml', 'rb'))\n"),
    "c.yaml": ("train:\n  batch_size: 48\n", "import yaml\nc = yaml.safe_load(open('c.yaml'))\n"),
    "d/c.json": (
        '{"train": {"batch_size": 48}}',
        "import json\nfrom pathlib import Path\nHERE = Path(__file__).resolve().parent\n"
        "c = json.loads((HERE / 'd' / 'c.json').read_text())\n",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_files_opened_by_the_source_are_read(tmp_path: Path, name: str):
    if name.endswith("yaml"):
        pytest.importorskip("yaml", reason="PyYAML is not installed")
    text, reading = CONFIGS[name]
    main = reading + "DataLoader(d, batch_size=c['train']['batch_size'])\n"
    found = facts_of(project(tmp_path, {"train.py": main, name: text}))
    assert found.batch_size is not None, found.notes
    assert found.batch_size.value == 48


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "c.json: not used"),
        ("[" * 100_000, "c.json: not used"),
        (json.dumps(list(range(10_000))), "more than 5000 values"),
    ],
)
def test_unusable_config_file_is_skipped(tmp_path: Path, text: str, why: str):
    main = "import json\nc = json.load(open('c.json'))\nf(batch_size=c['batch_size'])\n"
    found = facts_of(project(tmp_path, {"train.py": main, "c.json": text}))
    assert found.batch_size is None
    assert why in found.notes[0]


def test_yaml_aliases_that_expand_to_billions_are_bounded(tmp_path: Path):
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    main = "import yaml\nc = yaml.safe_load(open('c.yaml'))\nf(batch_size=c['a1'])\n"
    found = facts_of(project(tmp_path, {"train.py": main, "c.yaml": "\n".join(lines)}))
    assert "more than 5000 values" in found.notes[0]


MAIN = "from other import load\nload()\n"
OTHER = "def load(): AutoModel.from_pretrained('gpt2')\n"


def test_module_with_a_syntax_error_is_skipped(tmp_path: Path):
    found = facts_of(project(tmp_path, {"train.py": MAIN, "other.py": "def load(:\n"}))
    assert found.model.value == UNKNOWN
    assert "other.py: not read: line 1 does not parse" in found.notes[0]


def test_too_long_module_is_skipped(tmp_path: Path):
    folder = project(tmp_path, {"train.py": MAIN, "other.py": ""})
    with (folder / "other.py").open("wb") as file:
        file.truncate(10_000_000)
    found = facts_of(folder)
    assert found.model.value == UNKNOWN
    assert "other.py: not read: it has 10.0 MB" in found.notes[0]


@pytest.mark.parametrize("link", ["file", "folder", "loop", "pipe", "binary"])
def test_links_out_of_the_folder_and_special_files_are_not_read(tmp_path: Path, link: str):
    outside = project(tmp_path / "outside", {"other.py": OTHER, "__init__.py": OTHER})
    folder = project(tmp_path / "own", {"train.py": MAIN})
    if link == "file":
        (folder / "other.py").symlink_to(outside / "other.py")
    elif link == "folder":
        (folder / "other").symlink_to(outside)
    elif link == "loop":
        (folder / "other.py").symlink_to(folder / "other.py")
    elif link == "pipe":
        os.mkfifo(folder / "other.py")
    else:
        (folder / "other.py").write_bytes(b"\xff\xfe\x00bad")
    found = facts_of(folder)
    assert found.model.value == UNKNOWN
    assert "not read" in found.notes[0]


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside/c.json", "~/c.json", "c\0.json"])
def test_config_outside_the_folders_is_not_read(tmp_path: Path, path: str):
    project(tmp_path / "outside", {"c.json": '{"model": "gpt2"}'})
    main = f"import json\nc = json.load(open({path!r}))\nAutoModel.from_pretrained(c['model'])\n"
    found = facts_of(project(tmp_path / "own", {"train.py": main}))
    assert found.model.value == UNKNOWN
    assert "not read" in found.notes[0] or "does not parse" in found.notes[0]


def test_installed_packages_inside_the_folders_are_not_followed(tmp_path: Path):
    folder = project(tmp_path, {"train.py": MAIN, "site-packages/other.py": OTHER})
    source = SourceText(MAIN, file=str(folder / "site-packages" / "train.py"))
    assert extract_facts(source, folders=[folder]).model.value == UNKNOWN


def test_number_of_files_and_import_depth_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chain = {f"m{n}.py": f"import m{n + 1}\ndef go(): m{n + 1}.go()\n" for n in range(12)}
    last = {"m12.py": "def go(): f(batch_size=4)\n"}
    folder = project(tmp_path, {"train.py": "import m0\nm0.go()\n", **chain, **last})
    assert facts_of(folder).batch_size is None, "calls are followed to a depth of eight"
    monkeypatch.setattr(reading, "DEEPEST_CALLS", 20)
    assert facts_of(folder).batch_size is not None
    monkeypatch.setattr(reading, "MOST_FILES", 5)
    assert "the limit of 5 files is reached" in facts_of(folder).notes[0]
    monkeypatch.setattr(reading, "MOST_BYTES", 100)
    found = facts_of(folder)
    assert "of source is reached" in found.notes[0]


def test_imported_modules_are_not_read_without_source_folders(tmp_path: Path):
    project(tmp_path, {"other.py": OTHER})
    found = extract_facts(SourceText(MAIN, file=str(tmp_path / "train.py")))
    assert found.model.value == UNKNOWN
