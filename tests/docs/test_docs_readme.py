"""README is short, begins with what a newcomer does, and its figures name where they come from."""

from __future__ import annotations

import re
import subprocess

import pytest
from docs.pages import ROOT, programs, text_of

from benchmarks.quotes import quotes

README = text_of("README.md")
BENCHMARKS = text_of("benchmarks/README.md") + text_of("benchmarks/results.md")


def test_it_is_short_and_has_a_first_program_and_embeddings_in_ten_lines() -> None:
    assert len(README.splitlines()) <= 100
    first, embeddings = programs("README.md")
    assert "causal_lm()" in first.text
    assert "encoder(" in embeddings.text
    assert len(list(filter(str.strip, embeddings.text.splitlines()))) <= 10


def test_a_cluster_takes_ten_lines() -> None:
    section = README[README.index("## A cluster") : README.index("## Where to read on")]
    (block,) = re.findall(r"^```\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(block.splitlines()) <= 10


def test_each_figure_names_a_benchmark_and_is_one_of_its_results() -> None:
    rows = re.findall(r"^\|.*?([\d.]+) times .*?\| `make bench ARGS=(\w+)` \| (.*) \|$", README, re.MULTILINE)
    assert len(rows) == 3
    for figure, benchmark, spread in rows:
        low, high = re.findall(r"([\d.]+) to ([\d.]+)", spread)[0]
        assert f"{figure} ({low}-{high})" in BENCHMARKS
        assert f"`{benchmark}`" in BENCHMARKS


def test_figures_of_the_page_about_performance_are_results_of_benchmarks() -> None:
    page = text_of("docs/performance.md")
    found = re.findall(r"(\d[\d.]*)(?: times| s| %|)(?: of it done)? \((\d[\d.]*-\d[\d.]*)\)", page)
    assert len(found) >= 15
    for figure, spread in found:
        kept = BENCHMARKS.replace(" s (", " (").replace(" % (", " (")
        assert f"{figure} ({spread})" in kept or f"({spread})" in kept, f"{figure} ({spread})"


@pytest.mark.parametrize(("extras", "installs"), [("", '-e "."'), ("test", '-e ".[test]"')])
def test_make_install_takes_no_extras_too(extras: str, installs: str) -> None:
    said = subprocess.run(
        ["make", "-n", "-B", "install", f"EXTRAS={extras}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert installs in said.stdout


def test_what_pages_quote_of_the_reproductions_is_what_their_records_say() -> None:
    for quote in quotes():
        assert quote.line in quote.path.read_text().split("\n"), f"{quote.path.name}: python -m benchmarks.quotes"
