from __future__ import annotations

import pytest

from benchmarks.papers.slinfer import authors, data
from benchmarks.papers.slinfer.cases import SLINFER, Case, run
from benchmarks.papers.slinfer.worlds import Nodes

SEVEN = "llama-2-7b"


def test_rows_change_nodes_and_objectives_one_by_one() -> None:
    plain, objective = Nodes(), data.OBJECTIVE
    assert authors.nodes_of(("caps", "polls", "margin"), SEVEN, plain) == plain
    with_memory = authors.nodes_of(("memory",), SEVEN, plain)
    assert (with_memory.gpu_memory_bytes, with_memory.cpu_memory_bytes) == (72_000_000_000, 253_000_000_000)
    assert authors.nodes_of(authors.ROWS, SEVEN, plain).cache_s_per_gb == 0.03
    assert authors.objective_of(("cache",), objective) is objective
    tighter = authors.objective_of(("margin",), objective)
    for tokens in (10, 1000, 10_000):
        assert tighter.first_token_s(tokens) == pytest.approx(0.95 * objective.first_token_s(tokens))
    assert tighter.tpot_s == pytest.approx(0.95 * 0.25)
    assert authors.baseline_settings(()) == {}
    assert authors.baseline_settings(authors.ROWS) == {"poll_s": 0.25, "keep_alive_s": 1.1, "cpu_keep_alive_s": 0.0}


def test_mixed_model_sizes_are_refused_for_the_authors_program() -> None:
    with pytest.raises(ValueError, match="models of one size"):
        run(Case(SLINFER, 2, (SEVEN, "llama-2-13b"), program=authors.ROWS))
