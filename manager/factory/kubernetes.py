"""The factory's interface to Kubernetes: a block is a pod, created by Parsl's KubernetesProvider.

The provider derives a pod's name from the job's name: `stoker-k3v9-b7.1f2e3d4c`. The provider's pods always restart, so
this module deletes a pod after its pilot has ended once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from parsl.errors import OptionalModuleMissing
from parsl.jobs.states import JobState, JobStatus
from parsl.providers import KubernetesProvider

from stoker.manager.factory.batch import (
    BatchJobStatus,
    BatchSystemError,
    SubmissionRefused,
    block_of_job_name,
    job_name,
)
from stoker.protocol.blocks import ANYWHERE, AllowedNodes, BlockPhase
from stoker.protocol.ids import BlockId
from stoker.site import Provider, Site

_GPU_LABEL = "nvidia.com/gpu.product"
"""Node label that contains the GPU type, set by NVIDIA's GPU feature discovery."""
_PHASES_OF_PODS = {"Pending": BlockPhase.PENDING, "Running": BlockPhase.RUNNING}


class KubernetesBatch:
    """Kubernetes pods as batch jobs. The id of a job is the name of its pod."""

    def __init__(self, site: Site, *, session: str, command: Callable[[BlockId], str]) -> None:
        self._session = session
        self._command = command
        self._provider = _make_kubernetes_provider(site.provider)
        self._provider.kube_client = KubernetesClient(self._provider.kube_client, site.provider)

    def submit(self, block: BlockId, allowed: AllowedNodes = ANYWHERE) -> str:  # noqa: ARG002  # no choice of nodes
        job = self._call_api(self._provider.submit, self._command(block), 1, job_name(self._session, block))
        return str(self._provider.resources[job]["pod_name"])

    def query(self, jobs: Sequence[str]) -> Mapping[str, BatchJobStatus]:
        pods = self._list_pods_by_name()
        statuses = {
            job: _build_pod_status(pods[job]) if job in pods else BatchJobStatus(BlockPhase.ENDED, "deleted")
            for job in jobs
        }
        self.cancel([job for job, status in statuses.items() if job in pods and status.phase is BlockPhase.ENDED])
        return statuses

    def cancel(self, jobs: Sequence[str]) -> None:
        pods = self._list_pods_by_name()
        for job in jobs:
            if job in pods:
                self._provider.resources[job] = {"status": JobStatus(JobState.RUNNING), "pod_name": job}
                self._call_api(self._provider.cancel, [job])

    def find(self) -> Mapping[str, BlockId]:
        pods = self._list_pods_by_name()
        return {
            name: block for name in pods if (block := block_of_job_name(name.rpartition(".")[0], session=self._session))
        }

    def _list_pods_by_name(self) -> dict[str, Any]:
        listed = self._call_api(self._provider.kube_client.list_namespaced_pod, namespace=self._provider.namespace)
        return {pod.metadata.name: pod for pod in listed.items}

    def _call_api(self, what: Callable[..., Any], *args: Any, **more: Any) -> Any:
        try:
            return what(*args, **more)
        except Exception as error:  # the error classes of the Kubernetes package may not be importable
            status = getattr(error, "status", 0)
            words = f"Kubernetes: {getattr(error, 'reason', '') or error}"
            if status and 400 <= status < 500 and status not in (408, 429):
                raise SubmissionRefused(words) from error
            raise BatchSystemError(words) from error


class KubernetesClient:
    """Adds a time limit to requests. Adds walltime and GPU type to pods, because Parsl's provider omits them."""

    def __init__(self, client: Any, given: Provider) -> None:
        self._client = client
        self._given = given

    def __getattr__(self, name: str) -> Any:
        return partial(getattr(self._client, name), _request_timeout=float(self._given.command_limit_s))

    def create_namespaced_pod(self, *, namespace: str, body: Any) -> Any:
        body.spec.active_deadline_seconds = math.ceil(self._given.walltime_s)
        if self._given.gpu_type:
            body.spec.node_selector = {_GPU_LABEL: self._given.gpu_type}
        return self.__getattr__("create_namespaced_pod")(namespace=namespace, body=body)


def _make_kubernetes_provider(given: Provider) -> Any:
    memory = f"{given.memory_bytes // 2**20}Mi" if given.memory_bytes else "2048Mi"
    try:
        return KubernetesProvider(
            image=given.image,
            namespace=given.namespace or "default",
            init_cpu=given.cores or 1,
            max_cpu=given.cores or 1,
            init_mem=memory,
            max_mem=memory,
            extra_limits={"nvidia.com/gpu": str(given.gpu_count)} if given.gpu_count else None,
            worker_init=given.worker_init,
        )
    except OptionalModuleMissing as error:
        raise SubmissionRefused('Kubernetes needs a package: pip install "parsl[kubernetes]"') from error
    except Exception as error:
        raise SubmissionRefused(f"Kubernetes: {error}") from error


def _build_pod_status(pod: Any) -> BatchJobStatus:
    conditions = [one.message for one in pod.status.conditions or () if one.status == "False" and one.message]
    containers = pod.status.container_statuses or ()
    ends = [each.state.terminated or each.last_state.terminated for each in containers]
    codes = [end.exit_code for end in ends if end is not None]
    phase = BlockPhase.ENDED if codes else _PHASES_OF_PODS.get(pod.status.phase, BlockPhase.ENDED)
    if phase is BlockPhase.PENDING:
        waits = [each.state.waiting.reason for each in containers if each.state.waiting is not None]
        return BatchJobStatus(phase, "; ".join(filter(None, [*waits, *conditions])))
    if phase is BlockPhase.RUNNING:
        return BatchJobStatus(phase, f"on {pod.spec.node_name}" if pod.spec.node_name else "")
    if codes:
        return BatchJobStatus(phase, "done" if not any(codes) else f"exit code {max(codes)}")
    return BatchJobStatus(phase, "done" if pod.status.phase == "Succeeded" else pod.status.reason or "failed")
