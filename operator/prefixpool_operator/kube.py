"""The Kubernetes API as the operator uses it: plain dicts, few verbs, typed errors. No library's models beyond this seam.

Every call has a deadline; what cannot be reached in time is an `UnavailableError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from prefixpool.errors import PrefixpoolError
from prefixpool_operator.observed import Raw


class Resource(NamedTuple):
    """One kind, as manifests (`api_version`, `kind`) and URLs (`plural`) name it."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """ "" for the core group."""
        return self.api_version.rpartition("/")[0]


POOL: Final = Resource("prefixpool.dev/v1alpha1", "InferencePool", "inferencepools")
POD: Final = Resource("v1", "Pod", "pods")
CLAIM: Final = Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
SECRET: Final = Resource("v1", "Secret", "secrets")
EVENT: Final = Resource("v1", "Event", "events")
LEASE: Final = Resource("coordination.k8s.io/v1", "Lease", "leases")
NODE: Final = Resource("v1", "Node", "nodes", namespaced=False)
RESOURCE_SLICE: Final = Resource("resource.k8s.io/v1", "ResourceSlice", "resourceslices", namespaced=False)
STATEFUL_SET: Final = Resource("apps/v1", "StatefulSet", "statefulsets")

# Children that are applied and compared whole. Secrets are apart: they are never listed.
CHILDREN: Final = (
    STATEFUL_SET,
    Resource("apps/v1", "Deployment", "deployments"),
    Resource("v1", "Service", "services"),
    Resource("v1", "ConfigMap", "configmaps"),
    Resource("v1", "ServiceAccount", "serviceaccounts"),
    Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Resource("batch/v1", "Job", "jobs"),
)
# The router's own rights; only where the operator is allowed to give them.
RBAC_CHILDREN: Final = (
    Resource("rbac.authorization.k8s.io/v1", "Role", "roles"),
    Resource("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
)
_BY_KIND: Final = {resource.kind: resource for resource in (POOL, POD, CLAIM, SECRET, *CHILDREN, *RBAC_CHILDREN)}


def resource_of(kind: str) -> Resource:
    """Raises KeyError for a kind that the operator never touches."""
    return _BY_KIND[kind]


class Content(StrEnum):
    """How the server is to read a patch."""

    APPLY = "application/apply-patch+yaml"
    MERGE = "application/merge-patch+json"
    STRATEGIC = "application/strategic-merge-patch+json"


class KubeApi(Protocol):
    """All methods raise KubeError. `namespace` is "" for what has none, and in `list_all` for every namespace."""

    async def get(self, resource: Resource, namespace: str, name: str, *, metadata_only: bool = False) -> Raw: ...

    async def list_all(
        self, resource: Resource, namespace: str = "", *, labels: str = "", fields: str = "", metadata_only: bool = False
    ) -> list[Raw]:
        """The whole list, read in pages. `labels` and `fields` select; `metadata_only` leaves out spec and status."""
        ...

    async def create(self, resource: Resource, body: Raw) -> Raw: ...

    async def apply(self, resource: Resource, body: Raw, *, manager: str, force: bool = True, subresource: str = "") -> Raw:
        """Server-side apply: the fields of `body` become `manager`'s. ConflictError if another owns one and not `force`."""
        ...

    async def patch(
        self, resource: Resource, namespace: str, name: str, body: Raw, *, content: Content = Content.MERGE
    ) -> Raw:
        """With `metadata.resourceVersion` in the body: ConflictError if the object changed since. With uid likewise."""
        ...

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str = "", grace_s: int | None = None
    ) -> None:
        """In the background. ConflictError if it is not the object with this `uid`."""
        ...


class KubeError(PrefixpoolError):
    """The API server refused, or could not be asked. `status` is 0 when there was no answer."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class NotFoundError(KubeError):
    """No such object, or no such kind."""


class ConflictError(KubeError):
    """The object changed meanwhile, is another one, or the field has another owner."""


class AlreadyExistsError(ConflictError):
    """Somebody created it first."""


class GoneError(KubeError):
    """The resource version, or the place in a paged list, is too old."""


class ForbiddenError(KubeError):
    """The operator's ServiceAccount may not do this, or an admission policy refused."""


class InvalidError(KubeError):
    """The server read the object and refused it; the message names the field."""


class UnavailableError(KubeError):
    """No answer in time, overloaded, or broken inside; worth trying again."""


_BY_STATUS: Final[Mapping[int, type[KubeError]]] = {
    400: InvalidError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    413: InvalidError,
    422: InvalidError,
    429: UnavailableError,
}
_UNTYPED: Final = "failed to create typed patch object"  # server-side apply answers 500 to fields of a wrong type


def error_of(status: int, reason: str, message: str) -> KubeError:
    """From an answer of the API server (kind Status)."""
    if reason == "AlreadyExists":
        return AlreadyExistsError(message, status=status, reason=reason)
    if status == 500 and _UNTYPED in message:
        return InvalidError(message, status=status, reason=reason)
    kind = _BY_STATUS.get(status, UnavailableError if status >= 500 else KubeError)
    return kind(message, status=status, reason=reason)
