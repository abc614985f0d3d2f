"""The version of Stoker, for modules that the package itself imports."""

from __future__ import annotations

RELEASE = "0.1.0"
