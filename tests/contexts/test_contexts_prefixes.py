from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from stoker.contexts.forward import MIN_PREFIX_TOKENS, PrefixCache

Ids = tuple[int, ...]
A = tuple(range(100, 140))  # two templates that share 10 tokens
B = A[:10] + tuple(range(200, 240))


class Model:
    """A model that reuses prefixes like the runner; `read` returns the number of reused tokens."""

    def __init__(self, limit_bytes: int = 10_000) -> None:
        self.cache: PrefixCache[Ids] = PrefixCache(limit_bytes=limit_bytes, cut=lambda ids, length: ids[:length])
        self.computed = 0

    def read(self, rows: Sequence[Ids]) -> int:
        prefix, length = self.cache.find_shared_prefix(rows)
        if prefix is not None:
            for row in rows:
                assert prefix.kv[:length] == row[:length]
                assert length < len(row)
        self.computed += sum(len(row) - length for row in rows)
        self.cache.add_recent_prompt(rows[0], rows[0], len(rows[0]))
        return length


def claim(number: int, length: int = 12) -> Ids:
    return tuple(1000 * number + at for at in range(length))


def test_shared_template_is_found_in_consecutive_calls() -> None:
    model = Model()
    assert [model.read([A + claim(n)]) for n in range(1, 6)] == [0, 40, 40, 40, 40]
    for n in range(100, 150):
        model.read([claim(n, 60)])
    assert model.read([A + claim(7)]) == 40, "other prompts evict no shared template"


def test_alternating_templates_are_both_cached() -> None:
    model = Model()
    found = [model.read([template + claim(n)]) for n in range(1, 30) for template in (A, B)]
    assert found[:2] == [0, 10]  # template B shares its first 10 tokens with template A
    assert found[4:] == [40, 50] * 27


def test_prompts_with_equal_starts_do_not_evict_the_template() -> None:
    model = Model()
    the = (7, 8)
    for n in range(1, 40):
        model.read([A + the + claim(n)])
        model.read([A + claim(100 + n)])
    assert model.read([A + claim(1000)]) == 40


def test_batch_shares_the_common_prefix_of_its_rows() -> None:
    model = Model()
    model.read([A + claim(1)])
    assert model.read([A + claim(2), A + claim(3)]) == 40
    assert model.read([A + claim(2), B + claim(3)]) == 10


def test_last_token_and_short_prefixes_are_always_computed() -> None:
    short = tuple(range(MIN_PREFIX_TOKENS - 1))
    model = Model()
    assert [model.read([short + claim(n)]) for n in range(1, 4)] == [0, 0, 0]
    model.read([A])
    assert model.read([A]) == len(A) - 1
    assert model.read([A[:20]]) == 19


rows = st.lists(st.integers(0, 2), min_size=1, max_size=40).map(tuple)


@given(st.lists(st.lists(rows, min_size=1, max_size=3), max_size=30), st.integers(0, 200))
def test_cached_prefix_is_never_wrong_and_never_too_large(calls: list[list[Ids]], limit: int) -> None:
    model = Model(limit)
    for rows in calls:
        model.read(rows)  # `read` checks that each found prefix is the start of the rows
        assert model.cache.size_bytes <= limit
    model.cache.clear()
    assert model.cache.size_bytes == 0


def test_least_recently_used_prefix_is_evicted_first() -> None:
    model = Model(limit_bytes=600)
    templates = [tuple(range(1000 * t, 1000 * t + 100)) for t in range(1, 9)]
    for template in templates:
        for n in range(1, 4):
            model.read([template + claim(n, 4)])
    assert model.read([templates[-1] + claim(9, 4)]) == 100
    assert model.read([templates[0] + claim(9, 4)]) == 0
