"""Lines are sorted into templates, and a line of a known template is known again."""

from __future__ import annotations

import random

from stoker.manager.advice.logs.drain import ANY, NUMBER, Drain
from stoker.manager.advice.logs.templates import LineTemplates


def sorted_into(*lines: str, most: int = 100) -> Drain:
    drain = Drain(most=most)
    for line in lines:
        drain.add(line.split())
    return drain


def test_lines_that_differ_in_few_words_are_one_template() -> None:
    drain = sorted_into("send block a to host x", "send block b to host y", "connection closed by peer")
    assert sorted(drain) == ["connection closed by peer", f"send block {ANY} to host {ANY}"]
    assert drain.knows(["send", "block", "c", "to", "host", "z"])
    assert not drain.knows(["send", "block", "c", "from", "host", "z"])
    assert not drain.knows(["send", "block", "c", "to", "host"])


def test_lines_that_share_less_than_half_of_their_words_are_two_templates() -> None:
    drain = sorted_into("worker one has started", "worker two was lost")
    assert len(drain) == 2
    assert not drain.knows(["worker", "one", "was", "started"])


def test_numbers_count_neither_for_nor_against_a_template() -> None:
    loss, accuracy = (f"{NUMBER} {NUMBER} {NUMBER} {NUMBER} {what}" for what in ("loss", "accuracy"))
    assert sorted(sorted_into(loss, loss, accuracy)) == [accuracy, loss]


def test_empty_lines_and_lines_without_a_like_are_no_trouble() -> None:
    drain = sorted_into("", "one", "two")
    assert drain.knows([])
    assert drain.knows(["one"])
    assert not drain.knows(["three"])


def test_a_node_has_no_more_than_a_hundred_children() -> None:
    drain = sorted_into(*(f"{'x' * size} went well" for size in range(1, 301)), most=1000)
    assert all(drain.knows([("x" * size), "went", "well"]) for size in range(1, 301))
    assert drain.knows(["yy", "went", "well"])  # by the child of all further words


def test_the_templates_that_met_no_line_for_long_go() -> None:
    chance = random.Random(7)
    drain = Drain(most=40)
    words = ["".join(chance.choices("abcdefgh", k=12)) for _ in range(4000)]
    for at in range(0, 4000, 4):
        drain.add(words[at : at + 4])
        drain.add(["the", "daily", "line"])
    assert len(drain) <= 40
    assert drain.knows(["the", "daily", "line"])
    assert drain.knows(words[-4:])
    assert not drain.knows(words[:4])


def test_numbers_do_not_make_a_line_new() -> None:
    known = LineTemplates()
    known.learn([f"epoch {epoch} loss 0.{epoch} took {epoch}s" for epoch in range(50)])
    assert len(known) == 1
    assert known.knows("epoch 812 loss 0.00014 took 91s")
    assert not known.knows("epoch 812 loss nan took 91s")
