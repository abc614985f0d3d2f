"""Batches whose process is a small program instead of `stoker batch`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from polling import PATIENCE_S

from stoker.apps.gateway.batch_files import FileStore, GatewayBatch, parse_batch_request
from stoker.apps.gateway.batches import GatewayBatches
from stoker.apps.gateway.keys import KeyFile, KeyGuard
from stoker.apps.gateway.usage import UsageFile, UsageRecorder

CHAT = "/v1/chat/completions"
ANSWERS_THEN_WAITS = """
import json, pathlib, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
run.mkdir()
def record(name, status):
    usage = {"prompt_tokens": 10, "completion_tokens": 2}
    body = {"model": "small", "usage": usage} if status == 200 else {"error": {}}
    line = {"custom_id": name, "response": {"status_code": status, "body": body}}
    return {"custom_id": name, "infer_s": 1, "line": line}
lines = [record("r0", 200), record("r1", 400), record("r2", 200)]
text = "".join(json.dumps(line, separators=(",", ":")) + "\\n" for line in lines)
(run / "results.jsonl.part").write_text(text + '{"torn')
time.sleep(600)
"""


class ProgramBatches(GatewayBatches):
    def __init__(self, folder: Path, program: str = ANSWERS_THEN_WAITS, **more: Any) -> None:
        more = {
            "files": FileStore(folder / "files"), "guard": KeyGuard(KeyFile(folder / "keys.json")),
            "usage": UsageRecorder(UsageFile(folder / "usage.sqlite")), **more,
        }  # fmt: skip
        super().__init__(folder / "batches", models=Path("m.toml"), session="s", names=("small",), **more)
        self.program = program
        self.started: list[asyncio.subprocess.Process] = []

    async def _start_process(self, batch: GatewayBatch) -> asyncio.subprocess.Process:
        words = [sys.executable, "-c", self.program, "--out", str(self._run_folder(batch))]
        self.started.append(await asyncio.create_subprocess_exec(*words))
        return self.started[-1]

    async def begun(self, *, count: int = 5, **body: str) -> GatewayBatch:
        lines = [{"custom_id": f"r{n}", "method": "POST", "url": CHAT, "body": body} for n in range(count)]
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = self.files.add_file(data, filename="f", purpose="batch", owner="")
        asked = {"endpoint": CHAT, "input_file_id": file.id, "completion_window": "24h"}
        return await self.add_batch(parse_batch_request(json.dumps(asked).encode()))

    async def over(self, id: str) -> GatewayBatch:
        if id in self._tasks:
            await asyncio.wait_for(self._tasks[id], PATIENCE_S)
        return self.get_batch(id, owner="")
