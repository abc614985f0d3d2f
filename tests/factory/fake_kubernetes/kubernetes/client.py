from types import SimpleNamespace

PODS = {}
TROUBLE = []
LIMITS = set()


class ApiException(Exception):
    def __init__(self, status, reason):
        super().__init__(f"({status})\nReason: {reason}\n")
        self.status, self.reason = status, reason


class _Model(SimpleNamespace):
    pass


NAMESPACES = set()
V1EnvVar = V1ResourceRequirements = V1Container = V1ContainerPort = V1ObjectMeta = V1PodSpec = V1Pod = _Model
V1DeleteOptions = V1SecurityContext = V1VolumeMount = V1Volume = V1LocalObjectReference = _Model


class CoreV1Api:
    def create_namespaced_pod(self, *, namespace, body, _request_timeout):
        self._answer(_request_timeout)
        NAMESPACES.add(namespace)
        body.spec.node_name = ""
        body.status = SimpleNamespace(phase="Pending", reason="", conditions=[], container_statuses=None)
        PODS[body.metadata.name] = body
        return body

    def list_namespaced_pod(self, *, namespace, _request_timeout):
        self._answer(_request_timeout)
        return SimpleNamespace(items=list(PODS.values()))

    def delete_namespaced_pod(self, *, name, namespace, body, _request_timeout):
        self._answer(_request_timeout)
        return PODS.pop(name)

    def _answer(self, limit_s):
        LIMITS.add(limit_s)
        if TROUBLE:
            raise TROUBLE[0]
