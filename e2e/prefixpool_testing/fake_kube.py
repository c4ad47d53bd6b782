"""A `KubeApi` in memory: enough of an API server to test what talks to one. What real servers do is tested on a real one."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from itertools import count
from typing import Any

from prefixpool_operator.kube import AlreadyExistsError, ConflictError, Content, NotFoundError, Resource
from prefixpool_operator.observed import Raw

Place = tuple[str, str, str]  # kind, namespace, name


class FakeKube:
    """`fail` may raise for a call: (verb, kind, name). `calls` keeps all of them; writes are all but get and list."""

    def __init__(self) -> None:
        self.objects: dict[Place, Raw] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.forced: list[str] = []  # names of what was applied by force
        self.fail: Callable[[str, str, str], Exception | None] = lambda verb, kind, name: None
        self._ids = count(1)

    @property
    def writes(self) -> list[tuple[str, str, str]]:
        return [call for call in self.calls if call[0] not in ("get", "list")]

    def put(self, resource: Resource, name: str, namespace: str = "ns", **content: Any) -> Raw:
        """An object as if somebody else had made it."""
        meta = {"name": name, "namespace": namespace, **content.pop("metadata", {})}
        return self._store(resource, {"metadata": meta, **content})

    async def get(self, resource: Resource, namespace: str, name: str, *, metadata_only: bool = False) -> Raw:
        await asyncio.sleep(0)  # others have their turn, as on a network
        self._called("get", resource, name)
        found = self._found(resource, namespace, name)
        return copy.deepcopy({"metadata": found["metadata"]} if metadata_only else found)

    async def list_all(
        self, resource: Resource, namespace: str = "", *, labels: str = "", fields: str = "", metadata_only: bool = False
    ) -> list[Raw]:
        self._called("list", resource, labels or fields)
        wanted = dict(part.split("=") for part in labels.split(",") if part)
        exact = [part.split("=") for part in fields.split(",") if part]
        return [
            copy.deepcopy({"metadata": obj["metadata"]} if metadata_only else obj)
            for (kind, place, _), obj in self.objects.items()
            if kind == resource.kind
            and namespace in ("", place)
            and wanted.items() <= (obj["metadata"].get("labels") or {}).items()
            and all(_at(obj, path) == value for path, value in exact)
        ]

    async def create(self, resource: Resource, body: Raw) -> Raw:
        meta = body["metadata"]
        self._called("create", resource, meta["name"])
        if (resource.kind, meta.get("namespace", ""), meta["name"]) in self.objects:
            raise AlreadyExistsError(f"{resource.plural} {meta['name']} exists", status=409, reason="AlreadyExists")
        return self._store(resource, body)

    async def apply(self, resource: Resource, body: Raw, *, manager: str, force: bool = True, subresource: str = "") -> Raw:
        meta = body["metadata"]
        self.forced += [meta["name"]] if force else []
        self._called(f"apply {subresource}".strip(), resource, meta["name"])
        old = self.objects.get((resource.kind, meta.get("namespace", ""), meta["name"]))
        if old is None and "uid" in meta:
            raise ConflictError("uid mismatch: no such object", status=409, reason="Conflict")
        return self._store(resource, _merged(old or {}, body))

    async def patch(
        self, resource: Resource, namespace: str, name: str, body: Raw, *, content: Content = Content.MERGE
    ) -> Raw:
        self._called("patch", resource, name)
        old = self._found(resource, namespace, name)
        for field in ("resourceVersion", "uid"):
            wanted = body.get("metadata", {}).get(field)
            if wanted not in (None, old["metadata"][field]):
                raise ConflictError(f"{field} is another one", status=409, reason="Conflict")
        return self._store(resource, _merged(old, body))

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str = "", grace_s: int | None = None
    ) -> None:
        self._called("delete", resource, name)
        if uid not in ("", self._found(resource, namespace, name)["metadata"]["uid"]):
            raise ConflictError("uid is another one", status=409, reason="Conflict")
        del self.objects[resource.kind, namespace, name]

    def _called(self, verb: str, resource: Resource, name: str) -> None:
        self.calls.append((verb, resource.kind, name))
        error = self.fail(verb, resource.kind, name)
        if error is not None:
            raise error

    def _found(self, resource: Resource, namespace: str, name: str) -> Raw:
        try:
            return self.objects[resource.kind, namespace, name]
        except KeyError:
            raise NotFoundError(f"{resource.plural} {name} not found", status=404, reason="NotFound") from None

    def _store(self, resource: Resource, body: Raw) -> Raw:
        stored = copy.deepcopy(body) | {"apiVersion": resource.api_version, "kind": resource.kind}
        meta = stored["metadata"]
        meta.setdefault("uid", f"uid-{next(self._ids)}")
        meta.setdefault("generation", 1)
        meta["resourceVersion"] = str(next(self._ids))
        self.objects[resource.kind, meta.get("namespace", ""), meta["name"]] = stored
        return copy.deepcopy(stored)


def _at(obj: Raw, path: str) -> Any:
    found: Any = obj
    for name in path.split("."):
        found = (found or {}).get(name)
    return found


def _merged(old: Raw, new: Raw) -> Raw:
    out = dict(old)
    for key, value in new.items():
        out[key] = _merged(out.get(key) or {}, value) if isinstance(value, dict) else value
    return out
