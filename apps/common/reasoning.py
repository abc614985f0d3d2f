"""Separate a model's reasoning from its answer, piece by piece.

A model writes its reasoning between two marks. Some chat templates write the first mark at the end of the prompt. Blank
lines around the reasoning are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.apps.common.tool_calls import AnswerDelta, suffix_overlap_length

REASONING: Mapping[str, tuple[str, str]] = {
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
"""The marks before and after the reasoning, by the name of vLLM's parser."""
NO_REASONING = "none"
REASONING_PARSERS = (NO_REASONING, *REASONING)


def detect_reasoning_marks(template: str) -> str:
    """Return the name of the marks in a chat template, or `none`."""
    found = (name for name, (_, end) in REASONING.items() if end in template)
    return next(found, NO_REASONING)


class ReasoningParser:
    """Separates reasoning from text. `prompt`: may end with the first mark."""

    def __init__(self, marks: tuple[str, str], *, prompt: str) -> None:
        self._begin, self._end = marks
        self._is_reasoning = prompt.rstrip().endswith(self._begin)
        self._is_first = not self._is_reasoning
        """True while the answer may still begin with the first reasoning mark."""
        self._is_blank = True
        """True while the reasoning, or the answer after it, is blank."""
        self._held = ""

    def feed(self, text: str) -> AnswerDelta:
        self._held += text
        if self._is_first and not self._begins():
            return AnswerDelta()
        reasoning = self._take_reasoning() if self._is_reasoning else ""
        return AnswerDelta(reasoning, "" if self._is_reasoning else self._take_answer())

    def end(self) -> AnswerDelta:
        held, self._held = self._held, ""
        return AnswerDelta(reasoning=held.rstrip()) if self._is_reasoning else AnswerDelta(text=held)

    def _begins(self) -> bool:
        """Return False if more text must show whether the answer begins with the mark."""
        said = self._held.lstrip()
        if said.startswith(self._begin):
            self._is_reasoning, self._held = True, said.removeprefix(self._begin)
        elif self._begin.startswith(said):
            return False
        else:
            self._is_blank = False
        self._is_first = False
        return True

    def _take_reasoning(self) -> str:
        thought, mark, rest = self._held.partition(self._end)
        if mark:
            self._is_reasoning = False
            self._held = rest
            kept = thought.rstrip()
        else:
            kept = thought[: len(thought) - suffix_overlap_length(thought, self._end)].rstrip()
            self._held = thought[len(kept) :]
        if self._is_blank:
            kept = kept.lstrip()
        self._is_blank = bool(mark) or (self._is_blank and not kept)
        return kept

    def _take_answer(self) -> str:
        text, self._held = self._held, ""
        if self._is_blank:
            text = text.lstrip()
            self._is_blank = not text
        return text
