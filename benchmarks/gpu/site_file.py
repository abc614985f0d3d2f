"""The site file of a part of `make gpu`: this machine, its GPUs, or CPU devices in a rehearsal."""

from __future__ import annotations

from pathlib import Path

_SITE = """name = "gpu"

[provider]
kind = "local"
{provider}
[pilot]
devices = "{devices}"
probe = "never"
cache_size = "40 GB"
init_blocks = {pilots}
max_blocks = {pilots}

[session]
heartbeat = "500 ms"
lease = "20 s"

[policy]
name = "{policy}"
"""


def write_site(
    file: Path, *, devices: str, pilots: int = 1, policy: str = "default", own_scratch: Path | None = None
) -> Path:
    """Write a site file; return its path. `own_scratch`: each pilot gets its own folder and cache below this one."""
    provider = f'worker_init = \'export STOKER_SCRATCH="{own_scratch}/$$"; mkdir -p "$STOKER_SCRATCH"\'\n'
    file.write_text(
        _SITE.format(devices=devices, pilots=pilots, policy=policy, provider=provider if own_scratch else "")
    )
    return file
