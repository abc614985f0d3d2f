from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `benchmarks` stands there
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pilot"))  # and the manager's stand-in here
