"""The load index answers as a plain search does, whatever is put into it and dropped from it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker.manager.core.per_context import CLOSED, FREE, FULL, LoadIndex
from stoker.protocol.ids import LibraryId


class Shelf:
    """A library, as far as the index knows it."""

    def __init__(self, id: int) -> None:
        self.id = LibraryId(id)


@given(st.lists(st.tuples(st.integers(0, 6), st.one_of(st.none(), st.integers(CLOSED, 5))), max_size=60))
def test_it_answers_as_a_search_would(changes: list[tuple[int, int | None]]) -> None:
    shelves = [Shelf(n) for n in range(7)]
    index: LoadIndex[Shelf] = LoadIndex()
    listed: dict[int, int] = {}  # in the order in which they were listed
    for number, level in changes:
        listed.pop(number, None)
        if level is None:
            index.drop(shelves[number])
        else:
            index.put(shelves[number], level)
            listed[number] = level
        free = [id for id, at in listed.items() if at == FREE]
        busy = [id for id in sorted(listed, key=lambda id: listed[id]) if listed[id] >= FULL]
        assert [library.id for library in index.hottest()] == free[::-1]
        assert [library.id for library in index.least_loaded()] == sorted(
            busy, key=lambda id: (listed[id], list(listed).index(id))
        )
        backlogs = [listed[library.id] for library in index.most_backlogged()]
        assert backlogs == sorted((listed[id] for id in busy if listed[id] > FULL), reverse=True)
        assert len(index) == len(listed)


def test_calls_that_are_given_at_one_moment_are_one_burst() -> None:
    index: LoadIndex[Shelf] = LoadIndex()
    one, other = Shelf(1), Shelf(2)
    index.gave(one, 2, now=1.0)
    index.gave(one, 3, now=1.0)
    assert index.burst is not None
    assert (index.burst.library, index.burst.calls) == (one, 5)
    index.gave(one, 1, now=1.5)
    assert index.burst.calls == 1
    index.end_burst(other)
    assert index.burst.library is one
    index.end_burst(one)
    assert index.burst is None
