from __future__ import annotations

import re

import pytest
from docs.pages import ROOT, programs, text_of

from benchmarks.__main__ import BENCHMARKS as BENCHMARKS_BY_NAME
from benchmarks.quotes import quotes

README = text_of("README.md")
BENCHMARKS = text_of("benchmarks/FINDINGS.md") + text_of("benchmarks/RESULTS.md")


def test_readme_has_at_most_900_words_and_a_first_program() -> None:
    assert len(README.split()) <= 900
    (first,) = programs("README.md")
    assert "causal_lm()" in first.text


def test_changelog_and_docs_keep_their_word_limits() -> None:
    changes = text_of("CHANGELOG.md")
    assert len(changes[changes.index("## 0.1.0") :].split()) <= 900
    assert sum(len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")) <= 28_000


def test_each_benchmark_figure_names_its_command_and_record() -> None:
    section = README[README.index("## Figures") : README.index("## Serve models")]
    rows = re.findall(r"^\| .*\d.* \| `make .*` \| \[.*\]\((benchmarks/records/.*\.json)\) \|$", section, re.MULTILINE)
    assert len(rows) == 3
    for record in rows:
        assert (ROOT / record).is_file(), record


@pytest.mark.parametrize("image", re.findall(r"!\[[^\]]+\]\((.*?)\)", README))
def test_readme_images_load_nothing_from_other_hosts(image: str) -> None:
    text = (ROOT / image).read_text()
    assert set(re.findall(r"https?://[^\s\"')]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "<script" not in text


def test_figures_of_the_performance_page_are_benchmark_results() -> None:
    page = text_of("docs/performance.md")
    found = re.findall(r"(\d[\d.]*)(?: times| s| %|)(?: of it done)? \((\d[\d.]*-\d[\d.]*)\)", page)
    assert len(found) >= 15
    for figure, spread in found:
        kept = BENCHMARKS.replace(" s (", " (").replace(" % (", " (")
        assert f"{figure} ({spread})" in kept or f"({spread})" in kept, f"{figure} ({spread})"


def test_reproduction_results_on_the_pages_equal_their_records() -> None:
    for quote in quotes():
        assert quote.line in quote.path.read_text().split("\n"), f"{quote.path.name}: python -m benchmarks.quotes"


def test_benchmark_guide_is_short_and_names_every_experiment() -> None:
    guide = text_of("benchmarks/README.md")
    assert len(guide.split()) <= 1500
    assert [name for name in BENCHMARKS_BY_NAME if f"`{name}`" not in guide] == []
