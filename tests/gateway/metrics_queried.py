from __future__ import annotations

import re
from typing import Any


def metrics_queried(dashboard: dict[str, Any], *, row: str) -> set[str]:
    found, now = set(), ""
    for panel in dashboard["panels"]:
        now = panel["title"] if panel["type"] == "row" else now
        if now == row:
            for target in panel.get("targets", ()):
                found |= set(re.findall(r"\bstoker_\w+", target["expr"]))
    return found


def has_metric(text: str, name: str) -> bool:
    """True if a metric has a value or a declaration. An engine without a bounded cache reports no cache use."""
    return re.search(rf"^(# TYPE )?{name}[{{ ]", text, re.MULTILINE) is not None
