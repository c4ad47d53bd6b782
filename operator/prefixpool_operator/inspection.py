"""What an inspection of the model's files has found, is finding, or failed to find. The Job is in `render.inspection`."""

from __future__ import annotations

from typing import Any

import msgspec

from prefixpool.api.model import Model
from prefixpool.sizing import inspection
from prefixpool.sizing.errors import ShapeError
from prefixpool.sizing.inspection import Inspection
from prefixpool_operator.identity import A_INSPECTS, L_COMPONENT, Component, Identity
from prefixpool_operator.observed import Observed, Raw
from prefixpool_operator.remembered import Remembered


class Inspected(msgspec.Struct, frozen=True, kw_only=True):
    """One of `found`, `failed`, or neither: not begun, or running."""

    found: Inspection | None = None
    document: str = ""  # of `found`, to be remembered
    failed: str = ""
    tried: str = ""  # why its last try failed, while another one follows
    job: Raw | None = None  # of this model
    stale_job: Raw | None = None  # of another one


def subject(model: Model) -> str:
    """What an inspection is about."""
    return f"{model.source}@{model.revision or ''}"


def look(observed: Observed, remembered: Remembered, model: Model, identity: Identity) -> Inspected:
    """What is remembered counts before what a Job's pods say: those are gone one day."""
    about = subject(model)
    job = observed.children.get(("Job", identity.inspection))
    known = _known(remembered, about)
    if job is None:
        return known
    if (job["metadata"].get("annotations") or {}).get(A_INSPECTS) != about:
        return msgspec.structs.replace(known, stale_job=job)
    return msgspec.structs.replace(known if known.found else _of_job(observed, job), job=job)


def _known(remembered: Remembered, about: str) -> Inspected:
    before = remembered.inspected
    if before is None or before.subject != about:
        return Inspected()
    try:
        return Inspected(found=inspection.read(before.document), document=before.document)
    except ShapeError:  # somebody edited it: look again
        return Inspected()


def _of_job(observed: Observed, job: Raw) -> Inspected:
    failed = ""
    for ended in _ends(observed, job):
        text = ended.get("message") or ""
        try:
            return Inspected(found=inspection.read(text), document=text)
        except ShapeError as error:
            failed = str(error) if text else f"{ended.get('reason') or 'ended'}, exit code {ended.get('exitCode')}"
    conditions = (job.get("status") or {}).get("conditions") or ()
    if any(one["type"] in ("Failed", "Complete") and one["status"] == "True" for one in conditions):
        return Inspected(failed=failed or "its pods ended without a word")
    return Inspected(tried=failed)


def _ends(observed: Observed, job: Raw) -> list[Raw]:
    """Of containers, the oldest first."""
    own = [
        pod
        for pod in observed.pods
        if (pod["metadata"].get("labels") or {}).get(L_COMPONENT) == Component.INSPECTION
        and any(ref.get("uid") == job["metadata"]["uid"] for ref in pod["metadata"].get("ownerReferences") or ())
    ]
    states: list[Any] = [
        (one.get("state") or {}).get("terminated")
        for pod in sorted(own, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
        for one in (pod.get("status") or {}).get("containerStatuses") or ()
    ]
    return [state for state in states if state]
