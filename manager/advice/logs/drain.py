"""Drain: sort lines of a log into templates with a parse tree of fixed depth (He, Zhu, Zheng, Lyu, ICWS 2017).

The tree sorts lines first by how many words they have, then by their first words; a leaf holds the few templates that
share both. A line joins the template of its leaf with which most of its words agree, place by place, if enough do: the
words that differ become `ANY` there. Otherwise it begins a template of its own. A line costs some steps down the tree
and a comparison with the templates of one leaf, however many templates there are.

As in the paper a word with a digit is no step down the tree, and a node with many children sends further words to its
child `ANY`. Where we differ: a place that had numbers alone fits numbers alone, for `loss nan` is news after `loss
0.3`; such places count neither for nor against a template, or lines of numbers would all be alike; and when there are
too many templates, a quarter of them goes, those that met a line the longest ago, for a program changes over the years.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

ANY = "<*>"
"""Stands in a template for a word that varies."""
NUMBER = "<#>"
"""Stands, in lines too, for a word that has a digit."""
_LEADING_WORDS = 1
"""So many first words lead down the tree: with root and lengths, the paper's depth of 3."""
_MOST_CHILDREN = 100
_KEPT_PART = 0.75
_DIGIT = re.compile(r"\d")
_VARYING = (ANY, NUMBER)


class _Template:
    """The words of a template, and when it met a line last."""

    __slots__ = ("met", "words")

    def __init__(self, words: list[str], met: int) -> None:
        self.words = words
        self.met = met

    def fits(self, words: Sequence[str]) -> bool:
        """True if the words are these, but for what varies."""
        return all(mine in (word, ANY) for mine, word in zip(self.words, words, strict=True))


class _Branch:
    """A node of the tree; its leaves have templates, the others children."""

    __slots__ = ("children", "templates")

    def __init__(self) -> None:
        self.children: dict[str, _Branch] = {}
        self.templates: list[_Template] = []


class Drain:
    """Templates of lines. `similar`: the part of its words that a line shares with its template, from 0 to 1."""

    def __init__(self, *, similar: float = 0.5, most: int = 4000) -> None:
        self._similar = similar
        self._most = most
        self._met = 0
        self._templates: list[_Template] = []
        self._by_length: dict[int, _Branch] = {}

    def __len__(self) -> int:
        return len(self._templates)

    def __iter__(self) -> Iterator[str]:
        """The templates as text."""
        return (" ".join(template.words) for template in self._templates)

    def add(self, words: Sequence[str]) -> None:
        """Take in the words of a line."""
        self._met += 1
        best, agree = None, (-1.0, 0)
        for template in self._grown_leaf(words).templates:
            if (agrees := _agreement(template.words, words)) > agree:
                best, agree = template, agrees
        if best is None or agree[0] < self._similar:
            self.restore(words)
            return
        best.words = [mine if mine == word else ANY for mine, word in zip(best.words, words, strict=True)]
        best.met = self._met

    def restore(self, words: Sequence[str]) -> None:
        """Take in a template as it is."""
        if len(self._templates) >= self._most:
            self._forget()
        self._put(_Template(list(words), self._met))

    def knows(self, words: Sequence[str]) -> bool:
        """True if a template has exactly these words, but for what varies."""
        node = self._by_length.get(len(words))
        for word in words[:_LEADING_WORDS]:
            if node is None:
                return False
            node = node.children.get(word) or node.children.get(ANY)
        return node is not None and any(template.fits(words) for template in node.templates)

    def _grown_leaf(self, words: Sequence[str]) -> _Branch:
        """The leaf to which words lead, made if need be."""
        node = self._by_length.setdefault(len(words), _Branch())
        for word in words[:_LEADING_WORDS]:
            if word not in node.children and len(node.children) >= _MOST_CHILDREN - 1:
                word = ANY
            node = node.children.setdefault(word, _Branch())
        return node

    def _put(self, template: _Template) -> None:
        self._templates.append(template)
        self._grown_leaf(template.words).templates.append(template)

    def _forget(self) -> None:
        """Drop the templates that met a line the longest ago, and build the tree anew of the others."""
        kept = sorted(self._templates, key=lambda template: template.met)[-max(1, int(self._most * _KEPT_PART)) :]
        self._templates, self._by_length = [], {}
        for template in kept:
            self._put(template)


def words_of(line: str, most: int) -> list[str]:
    """The first words of a line; `NUMBER` for each that has a digit."""
    return [NUMBER if _DIGIT.search(word) else word for word in line.split()[:most]]


def _agreement(template: Sequence[str], words: Sequence[str]) -> tuple[float, int]:
    """Which part of the words agrees, and at how many places the template varies."""
    same = counted = varying = 0
    for mine, word in zip(template, words, strict=True):
        varying += mine == ANY
        if word not in _VARYING or mine not in _VARYING:
            counted += 1
            same += mine == word
    return (same / counted if counted else 1.0), varying
