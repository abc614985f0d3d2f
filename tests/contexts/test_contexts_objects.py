from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.contexts import objects
from stoker.contexts.manifest import decode, proves
from stoker.contexts.objects import copy_object, is_object_name, manifest_of, matches, object_of
from stoker.contexts.recipe import ObjectRef
from stoker.errors import RecipeError

# A tree maps names to bytes (a file, executable or not), a dict (a folder), or a string (the target of a link).
letters = st.characters(blacklist_characters="/\x00", blacklist_categories=["Cs"])
odd = st.sampled_from(["a\nb", 'q"', "'", "é", " ", "-", "file", "a b", "\t"])
name = odd | st.text(letters, min_size=1, max_size=6).filter(lambda text: text not in (".", ".."))
file = st.tuples(st.binary(max_size=6), st.booleans())
tree = st.recursive(
    st.dictionaries(name, file, max_size=3),
    lambda inner: st.dictionaries(name, file | inner, max_size=3),
    max_leaves=8,
)
Tree = dict[str, object]


def build(folder: Path, content: Tree) -> Path:
    folder.mkdir(parents=True)
    for called, part in content.items():
        place = folder / called
        if isinstance(part, dict):
            build(place, part)
        else:
            data, executable = part  # type: ignore[misc]
            place.write_bytes(data)
            place.chmod(0o755 if executable else 0o644)
    return folder


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree, tree)
def test_folders_have_equal_names_only_if_they_are_equal(tmp_path_factory, one, other):
    folder = tmp_path_factory.mktemp("t")
    first, second = object_of(build(folder / "1", one)), object_of(build(folder / "2", other))
    assert (first.name == second.name) == (one == other)
    assert is_object_name(first.name)
    assert proves(first.name, manifest_of(first))
    assert decode(manifest_of(first)).size_bytes == first.size_bytes
    copy_object(folder / "1", folder / "copy")
    assert object_of(folder / "copy").name == first.name
    assert matches(folder / "copy", first)
    shutil.rmtree(folder)


def test_file_has_an_object_name(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"weights")
    ref = object_of(tmp_path / "m.gguf")
    assert ref.name.startswith("file-")
    assert ref.name.endswith(".gguf")
    assert ref.size_bytes == 7
    assert ref.source == str(tmp_path / "m.gguf")
    (tmp_path / "other.gguf").write_bytes(b"weights")
    assert object_of(tmp_path / "other.gguf").name == ref.name
    (tmp_path / "odd.a b\n").write_bytes(b"weights")
    assert is_object_name(object_of(tmp_path / "odd.a b\n").name)
    assert not matches(tmp_path / "m.gguf", ObjectRef(name="file-" + "0" * 64, size_bytes=7))
    assert matches(tmp_path / "other.gguf", ref)


def test_links_are_part_of_the_name(tmp_path: Path) -> None:
    """A link inside the folder stays a link. A link to the outside, as in a hub cache, counts as its target."""
    plain = build(tmp_path / "plain", {"weights": (b"w", False), "sub": {"deep": (b"d", False)}})
    (tmp_path / "blob").write_bytes(b"w")
    hub = build(tmp_path / "hub", {"sub": {"deep": (b"d", False)}})
    (hub / "weights").symlink_to("../blob")
    assert object_of(hub).name == object_of(plain).name
    copy_object(hub, tmp_path / "copied")
    assert not (tmp_path / "copied" / "weights").is_symlink()
    (plain / "again").symlink_to("weights")
    linked = object_of(plain)
    copy_object(plain, tmp_path / "linked")
    assert os.readlink(tmp_path / "linked" / "again") == "weights"
    assert object_of(tmp_path / "linked").name == linked.name
    (plain / "again").unlink()
    (plain / "again").write_bytes(b"w")
    assert object_of(plain).name != linked.name
    (tmp_path / "door").symlink_to(plain)
    assert object_of(tmp_path / "door").name == object_of(plain).name


def test_invalid_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="nowhere"):
        object_of(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecipeError, match="neither a file nor a folder"):
        object_of(tmp_path / "pipe")
    loop = build(tmp_path / "loop", {"a": (b"", False)})
    (tmp_path / "out").symlink_to(loop)
    (loop / "back").symlink_to(tmp_path)
    with pytest.raises(RecipeError, match="link to a folder that contains it"):
        object_of(loop)
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "x").symlink_to("/nowhere/at/all")
    with pytest.raises(RecipeError, match="does not exist"):
        object_of(tmp_path / "dangling")


def test_file_names_that_are_not_text_are_named(tmp_path: Path) -> None:
    """The path of the folder must be text, because pilots receive the path; names in a folder may be any bytes."""
    folder = tmp_path / "d"
    folder.mkdir()
    odd = Path(os.fsdecode(os.fsencode(folder) + b"/\xff\n"))
    odd.write_bytes(b"x")
    ref = object_of(folder)
    copy_object(folder, tmp_path / "copy")
    assert matches(tmp_path / "copy", ref)
    with pytest.raises(RecipeError, match="not UTF-8"):
        object_of(odd)


def test_only_an_old_unchanged_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, memo = tmp_path / "big", tmp_path / "memo.sqlite"
    file.write_bytes(b"x" * 1000)
    reads: list[Path] = []
    real = objects._read_parts
    monkeypatch.setattr(objects, "_read_parts", lambda path: reads.append(path) or real(path))  # type: ignore[func-returns-value]
    ref = object_of(file, memo=memo)
    assert object_of(file, memo=memo) == ref
    assert len(reads) == 2, "a file that changed recently is not remembered, because it may change again unnoticed"
    monkeypatch.setattr(objects, "_RACY_NS", 0)
    assert object_of(file, memo=memo).name == object_of(file, memo=memo).name == ref.name
    assert len(reads) == 3
    file.write_bytes(b"y" * 1000)
    changed = object_of(file, memo=memo)
    assert changed.name != ref.name
    memo.write_bytes(b"this is no database, and long enough to be taken for one" * 50)
    for unusable in (memo, file / "not-a-folder" / "memo"):
        assert object_of(file, memo=unusable) == changed


def test_manifest_is_kept_or_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f.gguf"
    file.write_bytes(b"weights")
    ref = object_of(file)
    kept = manifest_of(ref)
    monkeypatch.setattr(objects, "_kept", type(objects._kept)())
    assert manifest_of(ref) == kept
    monkeypatch.setattr(objects, "_kept", type(objects._kept)())
    file.write_bytes(b"changed")
    with pytest.raises(RecipeError, match="has changed since the recipe was made"):
        manifest_of(ref)
    file.unlink()
    with pytest.raises(RecipeError, match="cannot be read"):
        manifest_of(ref)
