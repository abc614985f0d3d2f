"""Attribute failures to user or infrastructure, with the log lines that prove the cause."""

from __future__ import annotations

import pytest

from stoker.manager.advice.logs import Fault, FaultKind, classify_failure, locate_failure
from stoker.manager.advice.logs.classifier import extract_features

GOOD = [f"step {step} loss {1 / (step + 1):.4f}" for step in range(100)]
IN_USERS_CODE = ["Traceback (most recent call last):", '  File "/home/ada/train.py", line 9, in <module>', "    main()"]
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:21380"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has a total capacity of 39 GiB."


def verdict(*lines: str) -> Fault:
    located = locate_failure([*GOOD, *lines])
    assert located is not None
    fault = classify_failure(located)
    assert fault.proof
    assert all(line.number > len(GOOD) for line in fault.proof)
    assert 0 <= fault.sure <= 1
    return fault


@pytest.mark.parametrize(
    ("line", "kind", "component"),
    [
        ("[1.2] NVRM: Xid (PCI:0000:3b:00): 79, pid=12, GPU has fallen off the bus.", FaultKind.INFRASTRUCTURE, "gpu"),
        ("slurmstepd: *** JOB 7 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***", FaultKind.INFRASTRUCTURE, "scheduler"),
        ("srun: error: Node failure on gpu017", FaultKind.INFRASTRUCTURE, "node"),
        ("Host key verification failed.", FaultKind.INFRASTRUCTURE, "network"),
        ("slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-26T08:57:48 ***", FaultKind.USER, "scheduler"),
        ("srun: error: n1: task 1: Segmentation fault", FaultKind.USER, "code"),
        ("srun: error: invalid partition specified: gpuu", FaultKind.USER, "config"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.", FaultKind.USER, "memory"),
        ("train.py: error: argument --lr: invalid float value: 'x'", FaultKind.USER, "config"),
        ("ImportError: /opt/x.so: undefined symbol: _ZN3c10", FaultKind.FRAMEWORK, "versions"),
    ],
)
def test_log_line_is_attributed_to_user_or_infrastructure(line: str, kind: FaultKind, component: str):
    fault = verdict(line)
    assert (fault.kind, fault.component) == (kind, component)
    assert line in [proof.text for proof in fault.proof]


@pytest.mark.parametrize(
    ("exception", "kind"),
    [
        ("KeyError: 'label'", FaultKind.USER),
        ("ValueError: too many values to unpack", FaultKind.USER),
        ("OSError: [Errno 116] Stale file handle: '/nfs/x'", FaultKind.INFRASTRUCTURE),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", FaultKind.INFRASTRUCTURE),
        (OOM, FaultKind.USER),
        (OOM + " Process 41 has 36.40 GiB memory in use.", FaultKind.INFRASTRUCTURE),
        (LOST, FaultKind.INFRASTRUCTURE),
    ],
)
def test_exception_is_attributed_to_user_or_infrastructure(exception: str, kind: FaultKind):
    fault = verdict(*IN_USERS_CODE, exception)
    assert fault.kind is kind
    assert exception in [proof.text for proof in fault.proof]


def test_output_of_other_ranks_does_not_change_the_verdict():
    others = [f"[rank{rank}]: {line}" for rank in range(1, 600) for line in (*IN_USERS_CODE, LOST)]
    assert verdict(*others[:4], *IN_USERS_CODE, "KeyError: 'label'", *others).kind is FaultKind.USER


def test_job_cancelled_after_a_failed_rank_is_judged_by_that_rank():
    cancelled = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-26T08:57:48 ***"
    fault = verdict("[1.2] NVRM: Xid (PCI:0000:3b:00): 79, pid=12, GPU has fallen off the bus.", cancelled)
    assert (fault.kind, fault.component) == (FaultKind.INFRASTRUCTURE, "gpu")


@pytest.mark.parametrize(
    ("line", "sign"),
    [
        ("OSError: [Errno 122] Disk quota exceeded: '/home/ada/x'", "@errno:caller"),
        ("[12.345678] EXT4-fs error", "@speaks:kernel"),
        ("KeyError: 'a'", "@family:LookupError"),
        ("ncclSystemError: the socket is closed", "@field:network"),
    ],
)
def test_failure_features_include_errno_origin_and_exception_family(line: str, sign: str):
    located = locate_failure([*GOOD, line])
    assert located is not None
    assert sign in extract_features(located)


def test_secrets_are_masked_in_displayed_lines():
    fault = verdict(*IN_USERS_CODE, "KeyError: 'https://ada:hunter22@host/?token=abcdefgh'")
    assert "hunter22" not in str(fault)
    assert "abcdefgh" not in str(fault)
    assert "***" in str(fault)
