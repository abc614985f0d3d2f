"""Runs the demo, `stoker run fact_verification`, in a fresh process on a cold machine; its last line is JSON.

    python -m benchmarks.engine.demo --claims 900

`verdicts`: how many claims of each label got which label, a table for each prompt.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--claims", type=int, default=900)
    claims = ask.parse_args().claims
    with tempfile.TemporaryDirectory(prefix="facts-") as folder:
        command = [
            *(sys.executable, "-m", "stoker.manager.cli.main", "run", "fact_verification", "--fresh", "--json"),
            *("--limit", str(claims), "--out", str(Path(folder) / "out")),
        ]
        started = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
        seconds = time.monotonic() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed\n{done.stderr[-3000:]}")
    verdicts = [prompt["confusion"] for prompt in json.loads(done.stdout)["prompts"]]
    print(json.dumps({"seconds": seconds, "claims": claims, "verdicts": verdicts}))


if __name__ == "__main__":
    main()
