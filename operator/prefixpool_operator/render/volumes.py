"""What is mounted where. Containers cannot write anywhere else."""

from __future__ import annotations

from typing import Final

from prefixpool import names
from prefixpool.api.model import MODELS, Model
from prefixpool_operator.identity import KEY_ENGINE, KEY_SALT
from prefixpool_operator.observed import Raw
from prefixpool_operator.render.blueprint import Blueprint

RUN: Final = "/run/prefixpool"
HOME: Final = "/home/prefixpool"
DISK: Final = "/var/lib/prefixpool/disk"
CACHE: Final = "/var/cache/prefixpool/hub"  # huggingface_hub's HF_HUB_CACHE, where replicas share it
KEYS: Final = "/etc/prefixpool/keys"
AUTH: Final = "/etc/prefixpool/auth"
AUTH_KEY: Final = "keys"  # data key of spec.auth.keysSecret

CLAIM: Final = "disk"  # name of the claim template; claims are `disk-<pod>`
_RUN_BYTES: Final = 256 << 20  # the saved residency map is the largest file
_SIM_SHARED: Final = 64 << 20
_DISK_SPARE: Final = 1 << 30  # what the tier leaves free on its disk (disk_kv_free_bytes)
_DISK_OVERHEAD: Final = 20  # one part in so many goes to the file system


def disk_volume_bytes(kv_bytes: int) -> int:
    """Size of a volume that has room for so much KV."""
    return kv_bytes + kv_bytes // _DISK_OVERHEAD + _DISK_SPARE


def shared_memory_bytes(plan: Blueprint) -> int:
    return _SIM_SHARED if plan.simulated else plan.sizing.host_needs.shared_memory


def mount(name: str, path: str, *, read_only: bool = False) -> Raw:
    return {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})


def _empty(name: str, *, memory_bytes: int | None = None, size: int | None = None) -> Raw:
    if memory_bytes is not None:
        return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": str(memory_bytes)}}
    return {"name": name, "emptyDir": {"sizeLimit": str(size)} if size is not None else {}}


def _secret(name: str, secret: str, *keys: str) -> Raw:
    items = [{"key": key, "path": key} for key in keys]
    return {"name": name, "secret": {"secretName": secret, "items": items, "defaultMode": 0o440}}


def worker_volumes(plan: Blueprint) -> list[Raw]:
    """For the worker's container."""
    return [
        _empty("run", memory_bytes=_RUN_BYTES),
        _empty("shm", memory_bytes=shared_memory_bytes(plan)),
        _empty("home"),
        _empty("tmp"),
        _secret("engine-key", plan.identity.keys, KEY_ENGINE),
        *model_volumes(plan.spec.model),
        *_cache(plan),
        *_disk(plan),
    ]


def worker_mounts(plan: Blueprint) -> list[Raw]:
    return [
        mount("run", RUN),
        mount("shm", "/dev/shm"),
        mount("home", HOME),
        mount("tmp", "/tmp"),
        mount("engine-key", KEYS, read_only=True),
        *model_mounts(plan.spec.model),
        *([mount("cache", CACHE)] if plan.spec.model.cache else []),
        *([mount(CLAIM, DISK)] if plan.spec.kv_cache.disk else []),
    ]


def model_volumes(model: Model) -> list[Raw]:
    """Its files, where the spec names a claim with them."""
    if model.volume is None:
        return []
    return [{"name": "model", "persistentVolumeClaim": {"claimName": model.volume.claim_name, "readOnly": True}}]


def model_mounts(model: Model) -> list[Raw]:
    return [mount("model", MODELS, read_only=True)] if model.volume else []


def _cache(plan: Blueprint) -> list[Raw]:
    cache = plan.spec.model.cache
    return [{"name": "cache", "persistentVolumeClaim": {"claimName": cache.claim_name}}] if cache else []


def _disk(plan: Blueprint) -> list[Raw]:
    """A claim of one's own comes from the StatefulSet's template, not from here."""
    disk = plan.spec.kv_cache.disk
    if disk is None or disk.storage_class_name:
        return []
    if disk.shared_claim_name:
        return [{"name": CLAIM, "persistentVolumeClaim": {"claimName": disk.shared_claim_name}}]
    return [_empty(CLAIM, size=disk_volume_bytes(disk.size))]


def claim_templates(plan: Blueprint) -> list[Raw]:
    """Claims that each replica gets."""
    disk = plan.spec.kv_cache.disk
    if disk is None or not disk.storage_class_name:
        return []
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": CLAIM, "labels": plan.identity.labels()},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": disk.storage_class_name,
                "resources": {"requests": {"storage": str(disk_volume_bytes(disk.size))}},
            },
        }
    ]


def router_volumes(plan: Blueprint) -> list[Raw]:
    """For the router's container, which alone gets a token for the API server."""
    secret = plan.spec.auth.keys_secret
    return [
        _empty("router-tmp"),
        _secret("keys", plan.identity.keys, KEY_ENGINE, KEY_SALT),
        *([_secret("auth", secret, AUTH_KEY)] if secret else []),
        {
            "name": "token",
            "projected": {
                "defaultMode": 0o440,
                "sources": [
                    {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
                    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                    {"downwardAPI": {"items": [_namespace()]}},
                ],
            },
        },
    ]


def _namespace() -> Raw:
    return {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}


def router_mounts(plan: Blueprint) -> list[Raw]:
    return [
        mount("router-tmp", "/tmp"),
        mount("keys", KEYS, read_only=True),
        *([mount("auth", AUTH, read_only=True)] if plan.spec.auth.keys_secret else []),
        mount("token", names.SERVICE_ACCOUNT_DIR, read_only=True),
    ]
