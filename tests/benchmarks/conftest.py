from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:  # `benchmarks` is no installed package; `python -m pytest` finds it, `pytest` would not
    sys.path.insert(0, ROOT)
