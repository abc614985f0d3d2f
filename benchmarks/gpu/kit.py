"""`python benchmarks/gpu/kit.py`: download wheels for a GPU machine without network into `.gpu-kit`.

The machine must have PyTorch, Transformers, pyarrow and numpy.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "parsl", "dill", "setproctitle", "sortedcontainers", "tblib", "typeguard", "typing-extensions", "filelock", "pyzmq",
    "msgspec", "cloudpickle", "psutil", "nvidia-ml-py", "click", "rich", "markdown-it-py", "mdurl", "pygments",
    "requests", "urllib3", "charset-normalizer", "certifi", "idna",
    "gguf", "pytest", "pluggy", "iniconfig", "packaging", "pytest-timeout", "pytest-randomly", "hypothesis",
)  # fmt: skip
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux_2_5", "manylinux1")
MOST_BYTES = 64 << 20
KIT = ROOT / ".gpu-kit"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="3.12", help="Python version of the GPU machine [%(default)s]")
    parser.add_argument("--machine", default="x86_64", help="processor of the GPU machine [%(default)s]")
    asked = parser.parse_args()
    pins = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    known = {name.lower(): f"{name}=={version}" for name, version in pins}
    wanted = [known.get(name, name) for name in NAMES]
    platforms = [word for each in PLATFORMS for word in ("--platform", f"{each}_{asked.machine}")]
    KIT.mkdir(exist_ok=True)
    for old in KIT.glob("*.whl"):
        old.unlink()
    code = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
         "--python-version", asked.python, "--implementation", "cp", *platforms, "-d", str(KIT), *wanted],
        check=False,
    ).returncode  # fmt: skip
    size = sum(file.stat().st_size for file in KIT.glob("*.whl"))
    print(f"{KIT}: {len(list(KIT.glob('*.whl')))} wheels for Python {asked.python}, {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        print(f"the wheels have more than {MOST_BYTES >> 20} MiB: remove packages", file=sys.stderr)
    return code or int(size > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
