import json
import sys
from pathlib import Path
from types import SimpleNamespace

from kubernetes import client

from stoker.manager.factory.batch import BatchSystemError, SubmissionRefused
from stoker.manager.factory.batches import open_batch_system
from stoker.protocol.session import SessionFolder
from stoker.site import Duration, Provider, ProviderKind, Site

said = {}
site = Site(
    name="lab",
    provider=Provider(
        kind=ProviderKind.KUBERNETES,
        image="registry/stoker:1",
        namespace="lab-of-ana",
        gpus="NVIDIA-A10:2",
        cores=4,
        walltime_s=Duration(5400.0),
    ),
)
batch = open_batch_system(site, session="k3v9", folder=SessionFolder(Path(sys.argv[1])))


def look(job):
    seen = batch.query([job])[job]
    return [seen.phase.value, seen.reason]


job = batch.submit("b7")
pod = client.PODS[job]
[container] = pod.spec.containers
said["pod"] = [pod.metadata.name.rpartition(".")[0], container.image, container.resources.limits["nvidia.com/gpu"]]
said["walltime and kind of GPU"] = [pod.spec.active_deadline_seconds, pod.spec.node_selector]
said["runs a pilot"] = "stoker.pilot.main" in container.args[1]
said["namespace"] = sorted(client.NAMESPACES)
said["found"] = batch.find()[job]

no_room = SimpleNamespace(status="False", message="0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
pod.status.conditions = [no_room]
said["waits"] = look(job)
pod.status.phase, pod.spec.node_name = "Running", "n1"
said["runs"] = look(job)
nothing = SimpleNamespace(waiting=None, terminated=None)
ended = SimpleNamespace(waiting=None, terminated=SimpleNamespace(exit_code=3))
pod.status.container_statuses = [SimpleNamespace(state=nothing, last_state=ended)]
said["started again by Kubernetes"] = look(job)
said["deleted then"] = job not in client.PODS
said["gone"] = look(job)

other = batch.submit("b8")
batch.cancel([other, "stoker-k3v9-b9.none"])
said["cancelled"] = other not in client.PODS

for error in (
    client.ApiException(403, "Forbidden"),
    client.ApiException(503, "Service Unavailable"),
    OSError("no route"),
):
    client.TROUBLE[:] = [error]
    try:
        batch.submit("b9")
    except (BatchSystemError, SubmissionRefused) as caught:
        said[str(caught)] = type(caught).__name__
said["time limits"] = sorted(client.LIMITS)
print(json.dumps(said))
