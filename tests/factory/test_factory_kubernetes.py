from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.manager.factory.batch import SubmissionRefused
from stoker.manager.factory.batches import open_batch_system
from stoker.protocol.session import SessionFolder
from stoker.site import Provider, ProviderKind, Site

FAKE = Path(__file__).with_name("fake_kubernetes")


def test_kubernetes_block_runs_as_a_pod(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(FAKE / "scenario.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(FAKE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == {
        "pod": ["stoker-k3v9-b7", "registry/stoker:1", "2"],
        "walltime and kind of GPU": [5400, {"nvidia.com/gpu.product": "NVIDIA-A10"}],
        "runs a pilot": True,
        "namespace": ["lab-of-ana"],
        "found": "b7",
        "waits": ["pending", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."],
        "runs": ["running", "on n1"],
        "started again by Kubernetes": ["ended", "exit code 3"],
        "deleted then": True,
        "gone": ["ended", "deleted"],
        "cancelled": True,
        "Kubernetes: Forbidden": "SubmissionRefused",
        "Kubernetes: Service Unavailable": "BatchSystemError",
        "Kubernetes: no route": "BatchSystemError",
        "time limits": [30.0],
    }


@pytest.mark.skipif(importlib.util.find_spec("kubernetes") is not None, reason="the kubernetes package is here")
def test_missing_package_is_named(folder: SessionFolder) -> None:
    site = Site(name="lab", provider=Provider(kind=ProviderKind.KUBERNETES, image="i"))
    with pytest.raises(SubmissionRefused, match=r'pip install "parsl\[kubernetes\]"'):
        open_batch_system(site, session="k3v9", folder=folder)
