"""The page's section on Table 1: how fast each kind of GPU is assumed to be."""

from __future__ import annotations

from benchmarks.papers.pervasive import paper, worlds
from benchmarks.papers.pervasive.found import Found
from benchmarks.papers.pervasive.predict import PEAKS
from benchmarks.tables import head, paragraph, row

_FITTED = (paper.A10, paper.TITAN)


def section(found: Found) -> str:
    lines = [
        "## Table 1: the speeds of the kinds",
        "",
        paragraph("""No text gives them. Two kinds were fitted; an inference on another takes a power of its peak rate
            (by its maker's data sheet, in 10^12 operations a second) that goes through these two. Seconds an inference:
            with the most central set, and over all sets. Figure 9a as the cluster uses 32-bit arithmetic, Figure 9b
            either."""),
        "",
        *head(
            "kind", "GPUs", *(f"{what}: {words}" for words, _ in PEAKS for what in ("peak", "seconds")), "loads as"
        ),
    ]  # fmt: skip
    for kind, count in paper.TABLE_1.items():
        cells = [f"{kind} (fitted)" if kind in _FITTED else kind, f"{count:.0f}"]
        for _, peaks in PEAKS:
            values = [worlds.item_s(each.parameters, kind, peaks=peaks) for each in found.fits]
            cells += [f"{peaks[kind]:g}", f"{values[0]:.2g} ({min(values):.2g} to {max(values):.2g})"]
        lines.append(row(*cells, "TITAN X" if kind in paper.OLD else "A10"))
    return "\n".join([*lines, ""])
