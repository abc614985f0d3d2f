"""A submit script needs Parsl's providers, not the rest of Parsl, which takes seconds to import on a busy node."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from stoker.manager.factory.parsl_parts import import_in_parts
import_in_parts()
from stoker.manager.factory.submitting import render
from stoker.site import Provider, ProviderKind, Site
site = Site(name="lab", provider=Provider(kind=ProviderKind.SLURM))
assert "#SBATCH --job-name=x" in render(site, job="x", command="true")
print([name for name in ("parsl.dataflow.dflow", "parsl.executors", "parsl.monitoring") if name in sys.modules])
import parsl
print(parsl.Config.__name__, parsl.providers.SlurmProvider.__name__, type(parsl).__name__)
from parsl import python_app
print(parsl.python_app is python_app, "parsl.executors" in sys.modules)
"""


def test_providers_are_imported_without_the_rest_which_comes_when_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "Config SlurmProvider module", "True True"]
