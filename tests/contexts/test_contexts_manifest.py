from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.contexts.manifest import (
    PART_BYTES,
    Entry,
    EntryKind,
    Manifest,
    decode,
    encode,
    is_piece_intact,
    name_of,
    piece_size_bytes,
    pieces,
    proves,
    read_manifest,
)
from stoker.contexts.objects import Published, manifest_of, object_of, publish
from stoker.contexts.recipe import ObjectRef

DIGEST = bytes(32)


def files(*sizes: int) -> Manifest:
    entries = [
        Entry(b"%05d" % number, EntryKind.FILE, size_bytes=size, parts=DIGEST * -(-size // PART_BYTES))
        for number, size in enumerate(sizes)
    ]
    return Manifest(EntryKind.FOLDER, tuple(entries))


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
    data = encode(manifest)
    assert decode(data) == read_manifest(name_of(data), data) == manifest
    assert name_of(data).startswith("folder-")
    assert proves(name_of(data), data)
    place = draw.draw(st.integers(0, len(data) - 1))
    changed = data[:place] + bytes([data[place] ^ draw.draw(st.integers(1, 255))]) + data[place + 1 :]
    assert not proves(name_of(data), changed)
    with pytest.raises(ValueError, match="not the manifest"):
        read_manifest(name_of(data), changed)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused_or_decode_to_themselves(data: bytes) -> None:
    try:
        found = decode(data)
    except ValueError:
        return
    assert encode(found) == data


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
def test_names_outside_the_folder_are_refused(names: list[bytes]) -> None:
    data = encode(Manifest(EntryKind.FOLDER, tuple(Entry(name, EntryKind.FILE) for name in names)))
    with pytest.raises(ValueError, match="at an invalid place"):
        decode(data)


def test_links_to_the_outside_and_files_below_are_refused() -> None:
    below = (Entry(b"out", EntryKind.LINK, target=b".."), Entry(b"out/x", EntryKind.FILE))
    links = [(Entry(b"out", EntryKind.LINK, target=target),) for target in (b"/etc/passwd", b"", b"a\0b")]
    for entries, says in ((below, "at an invalid place"), *((link, "leads to") for link in links)):
        with pytest.raises(ValueError, match=says):
            decode(encode(Manifest(EntryKind.FOLDER, entries)))


def test_pieces_are_whole_parts_of_at_most_four_mebibytes() -> None:
    manifest = files(10, PART_BYTES, 3 * PART_BYTES + 1, *[100] * 3000)
    cut = pieces(manifest)
    assert [piece_size_bytes(piece) for piece in cut[:4]] == [10, PART_BYTES, PART_BYTES, PART_BYTES]
    assert sum(map(piece_size_bytes, cut)) == manifest.size_bytes
    assert all(piece_size_bytes(piece) <= PART_BYTES and len(piece) <= 1024 for piece in cut)
    assert len(cut) < 10
    order = [(part.entry, part.offset) for piece in cut for part in piece]
    assert order == sorted(order)


def test_piece_is_intact_only_with_its_own_bytes(tmp_path: Path) -> None:
    data = os.urandom(2 * PART_BYTES + 5)
    (tmp_path / "big").write_bytes(data)
    ref = object_of(tmp_path / "big")
    cut = pieces(read_manifest(ref.name, manifest_of(ref)))
    last = memoryview(data)[2 * PART_BYTES :]
    intact = [is_piece_intact(cut[at], found) for at, found in ((2, last), (2, last[:-1]), (1, last), (2, bytes(5)))]
    assert intact == [True, False, False, False]


def test_published_objects_are_found_as_the_list_grows(tmp_path: Path) -> None:
    one, two = ObjectRef("file-" + "1" * 64, 5, "/a/b\nc"), ObjectRef("file-" + "2" * 64, 6, "/d")
    published = Published(tmp_path)
    assert published.find(one.name) is None
    publish(tmp_path, (one,))
    assert published.find(one.name) == one
    publish(tmp_path, ())
    with (tmp_path / "index.jsonl").open("ab") as file:
        file.write(b'no json\n{"name": 3}\n')
    publish(tmp_path, (two,))
    assert published.find(two.name) == two
    with (tmp_path / "index.jsonl").open("ab") as file:
        file.write(b'{"name": "half')  # another program is writing this line
    assert published.find("half") is None
    assert published.find(one.name) == one
