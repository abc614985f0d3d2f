from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.contexts import objects
from stoker.contexts.manifest import (
    PART_BYTES,
    Entry,
    EntryKind,
    Manifest,
    decode_manifest,
    encode_manifest,
    group_into_pieces,
    is_manifest_of,
    is_piece_intact,
    object_name_of_manifest,
    piece_size_bytes,
    read_manifest,
)
from stoker.contexts.objects import (
    PublishedObjects,
    copy_object,
    has_content_of,
    is_object_name,
    make_object_ref,
    publish_objects,
    read_object_manifest,
)
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
def test_object_names_of_folders_are_equal_only_for_equal_content(tmp_path_factory, one, other):
    folder = tmp_path_factory.mktemp("t")
    first, second = make_object_ref(build(folder / "1", one)), make_object_ref(build(folder / "2", other))
    assert (first.name == second.name) == (one == other)
    assert is_object_name(first.name)
    assert is_manifest_of(first.name, read_object_manifest(first))
    assert decode_manifest(read_object_manifest(first)).size_bytes == first.size_bytes
    copy_object(folder / "1", folder / "copy")
    assert make_object_ref(folder / "copy").name == first.name
    assert has_content_of(folder / "copy", first)
    shutil.rmtree(folder)


def test_object_name_of_a_file_depends_on_its_content(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"weights")
    ref = make_object_ref(tmp_path / "m.gguf")
    assert ref.name.startswith("file-")
    assert ref.name.endswith(".gguf")
    assert ref.size_bytes == 7
    assert ref.source == str(tmp_path / "m.gguf")
    (tmp_path / "other.gguf").write_bytes(b"weights")
    assert make_object_ref(tmp_path / "other.gguf").name == ref.name
    (tmp_path / "odd.a b\n").write_bytes(b"weights")
    assert is_object_name(make_object_ref(tmp_path / "odd.a b\n").name)
    assert not has_content_of(tmp_path / "m.gguf", ObjectRef(name="file-" + "0" * 64, size_bytes=7))
    assert has_content_of(tmp_path / "other.gguf", ref)


def test_links_inside_a_folder_are_part_of_its_object_name(tmp_path: Path) -> None:
    """A link inside the folder stays a link. A link to a file outside, as in a hub cache, counts as its target."""
    plain = build(tmp_path / "plain", {"weights": (b"w", False), "sub": {"deep": (b"d", False)}})
    (tmp_path / "blob").write_bytes(b"w")
    hub = build(tmp_path / "hub", {"sub": {"deep": (b"d", False)}})
    (hub / "weights").symlink_to("../blob")
    assert make_object_ref(hub).name == make_object_ref(plain).name
    copy_object(hub, tmp_path / "copied")
    assert not (tmp_path / "copied" / "weights").is_symlink()
    (plain / "again").symlink_to("weights")
    linked = make_object_ref(plain)
    copy_object(plain, tmp_path / "linked")
    assert os.readlink(tmp_path / "linked" / "again") == "weights"
    assert make_object_ref(tmp_path / "linked").name == linked.name
    (plain / "again").unlink()
    (plain / "again").write_bytes(b"w")
    assert make_object_ref(plain).name != linked.name
    (tmp_path / "door").symlink_to(plain)
    assert make_object_ref(tmp_path / "door").name == make_object_ref(plain).name


def test_invalid_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="nowhere"):
        make_object_ref(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecipeError, match="neither a file nor a folder"):
        make_object_ref(tmp_path / "pipe")
    loop = build(tmp_path / "loop", {"a": (b"", False)})
    (tmp_path / "out").symlink_to(loop)
    (loop / "back").symlink_to(tmp_path)
    with pytest.raises(RecipeError, match="link to a folder that contains it"):
        make_object_ref(loop)
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "x").symlink_to("/nowhere/at/all")
    with pytest.raises(RecipeError, match="does not exist"):
        make_object_ref(tmp_path / "dangling")


def test_folder_may_contain_file_names_that_are_not_utf8(tmp_path: Path) -> None:
    """Names in a folder may be any bytes. The path of the folder must be text, because pilots receive the path."""
    folder = tmp_path / "d"
    folder.mkdir()
    odd = Path(os.fsdecode(os.fsencode(folder) + b"/\xff\n"))
    odd.write_bytes(b"x")
    ref = make_object_ref(folder)
    copy_object(folder, tmp_path / "copy")
    assert has_content_of(tmp_path / "copy", ref)
    with pytest.raises(RecipeError, match="not UTF-8"):
        make_object_ref(odd)


def test_file_is_read_again_unless_it_is_old_and_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, memo = tmp_path / "big", tmp_path / "memo.sqlite"
    file.write_bytes(b"x" * 1000)
    reads: list[Path] = []
    real = objects._digest_parts
    monkeypatch.setattr(objects, "_digest_parts", lambda path: reads.append(path) or real(path))  # type: ignore[func-returns-value]
    ref = make_object_ref(file, digest_cache_file=memo)
    assert make_object_ref(file, digest_cache_file=memo) == ref
    assert len(reads) == 2, "a file that changed recently is not remembered, because it may change again unnoticed"
    monkeypatch.setattr(objects, "_RECENT_CHANGE_NS", 0)
    assert (
        make_object_ref(file, digest_cache_file=memo).name
        == make_object_ref(file, digest_cache_file=memo).name
        == ref.name
    )
    assert len(reads) == 3
    file.write_bytes(b"y" * 1000)
    changed = make_object_ref(file, digest_cache_file=memo)
    assert changed.name != ref.name
    memo.write_bytes(b"this is no database, and long enough to be taken for one" * 50)
    for unusable in (memo, file / "not-a-folder" / "memo"):
        assert make_object_ref(file, digest_cache_file=unusable) == changed


def test_manifest_is_rebuilt_unless_its_file_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f.gguf"
    file.write_bytes(b"weights")
    ref = make_object_ref(file)
    kept = read_object_manifest(ref)
    monkeypatch.setattr(objects, "_manifest_cache", type(objects._manifest_cache)())
    assert read_object_manifest(ref) == kept
    monkeypatch.setattr(objects, "_manifest_cache", type(objects._manifest_cache)())
    file.write_bytes(b"changed")
    with pytest.raises(RecipeError, match="has changed since the recipe was made"):
        read_object_manifest(ref)
    file.unlink()
    with pytest.raises(RecipeError, match="cannot be read"):
        read_object_manifest(ref)


# ---- manifests

DIGEST = bytes(32)


component = st.binary(min_size=1, max_size=5).filter(
    lambda name: name not in (b".", b"..") and b"/" not in name and b"\0" not in name
)
content = st.one_of(
    st.builds(lambda size, x: ("file", size, x), st.integers(0, 3 * PART_BYTES), st.booleans()),
    st.builds(lambda target: ("link", target), component),
    st.just(("folder",)),
)


def entry(name: bytes, made: tuple) -> Entry:  # type: ignore[type-arg]
    if made[0] == "file":
        parts = DIGEST * -(-made[1] // PART_BYTES)
        return Entry(name, EntryKind.FILE, executable=made[2], size_bytes=made[1], parts=parts)
    return Entry(name, EntryKind.LINK, target=made[1]) if made[0] == "link" else Entry(name, EntryKind.FOLDER)


folders = st.dictionaries(component, content, max_size=5).map(
    lambda made: Manifest(EntryKind.FOLDER, tuple(entry(name, made[name]) for name in sorted(made)))
)


@given(folders, st.data())
def test_manifest_is_read_whole_or_rejected(manifest: Manifest, draw: st.DataObject) -> None:
    data = encode_manifest(manifest)
    assert decode_manifest(data) == read_manifest(object_name_of_manifest(data), data) == manifest
    assert object_name_of_manifest(data).startswith("folder-")
    assert is_manifest_of(object_name_of_manifest(data), data)
    place = draw.draw(st.integers(0, len(data) - 1))
    changed = data[:place] + bytes([data[place] ^ draw.draw(st.integers(1, 255))]) + data[place + 1 :]
    assert not is_manifest_of(object_name_of_manifest(data), changed)
    with pytest.raises(ValueError, match="not the manifest"):
        read_manifest(object_name_of_manifest(data), changed)


@given(st.binary(max_size=200))
def test_decoded_manifest_encodes_to_the_same_bytes(data: bytes) -> None:
    try:
        found = decode_manifest(data)
    except ValueError:
        return
    assert encode_manifest(found) == data


@pytest.mark.parametrize(
    "names",
    [
        [b"../x"],
        [b"/etc"],
        [b"a/b"],  # the entry of the folder `a` is missing
        [b".."],
        [b"b", b"a"],  # the names are not sorted
        [b"a", b"a"],
        [b"a\0"],
        [b""],
        [b"a/"],
    ],
)
def test_manifest_with_invalid_file_names_is_refused(names: list[bytes]) -> None:
    data = encode_manifest(Manifest(EntryKind.FOLDER, tuple(Entry(name, EntryKind.FILE) for name in names)))
    with pytest.raises(ValueError, match="at an invalid place"):
        decode_manifest(data)


def test_manifest_with_links_to_the_outside_is_refused() -> None:
    below = (Entry(b"out", EntryKind.LINK, target=b".."), Entry(b"out/x", EntryKind.FILE))
    links = [(Entry(b"out", EntryKind.LINK, target=target),) for target in (b"/etc/passwd", b"", b"a\0b")]
    for entries, says in ((below, "at an invalid place"), *((link, "has the invalid target") for link in links)):
        with pytest.raises(ValueError, match=says):
            decode_manifest(encode_manifest(Manifest(EntryKind.FOLDER, entries)))


def test_pieces_are_whole_parts_of_at_most_four_mebibytes() -> None:
    sizes = (10, PART_BYTES, 3 * PART_BYTES + 1, *[100] * 3000)
    entries = [entry(b"%05d" % number, ("file", size, False)) for number, size in enumerate(sizes)]
    manifest = Manifest(EntryKind.FOLDER, tuple(entries))
    cut = group_into_pieces(manifest)
    assert [piece_size_bytes(piece) for piece in cut[:4]] == [10, PART_BYTES, PART_BYTES, PART_BYTES]
    assert sum(map(piece_size_bytes, cut)) == manifest.size_bytes
    assert all(piece_size_bytes(piece) <= PART_BYTES and len(piece) <= 1024 for piece in cut)
    assert len(cut) < 10
    order = [(part.entry, part.offset) for piece in cut for part in piece]
    assert order == sorted(order)


def test_piece_is_intact_only_with_its_own_bytes(tmp_path: Path) -> None:
    data = os.urandom(2 * PART_BYTES + 5)
    (tmp_path / "big").write_bytes(data)
    ref = make_object_ref(tmp_path / "big")
    cut = group_into_pieces(read_manifest(ref.name, read_object_manifest(ref)))
    last = memoryview(data)[2 * PART_BYTES :]
    intact = [is_piece_intact(cut[at], found) for at, found in ((2, last), (2, last[:-1]), (1, last), (2, bytes(5)))]
    assert intact == [True, False, False, False]


def test_published_objects_are_found_as_the_list_grows(tmp_path: Path) -> None:
    one, two = ObjectRef("file-" + "1" * 64, 5, "/a/b\nc"), ObjectRef("file-" + "2" * 64, 6, "/d")
    published = PublishedObjects(tmp_path)
    assert published.find(one.name) is None
    publish_objects(tmp_path, (one,))
    assert published.find(one.name) == one
    publish_objects(tmp_path, ())
    with (tmp_path / "index.jsonl").open("ab") as file:
        file.write(b'no json\n{"name": 3}\n')
    publish_objects(tmp_path, (two,))
    assert published.find(two.name) == two
    with (tmp_path / "index.jsonl").open("ab") as file:
        file.write(b'{"name": "half')  # another program is writing this line
    assert published.find("half") is None
    assert published.find(one.name) == one
