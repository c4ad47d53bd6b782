"""Whether a child must be written: only if it was rendered differently, or if another's edit undid what is ours.

An edit is put back once. If the very same one is there again soon after, somebody insists: then the pool says so and leaves
it for a while, because two controllers that undo one another help nobody. The note of this is on the child itself, so that
an operator that has just started knows it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

import msgspec

from prefixpool.api.quantity import Amount, Bytes
from prefixpool.listing import listed
from prefixpool_operator.actions import FIELD_MANAGER, Apply
from prefixpool_operator.digest import digest
from prefixpool_operator.identity import A_APPLIED, A_PUT_BACK
from prefixpool_operator.observed import Raw
from prefixpool_operator.timestamp import seconds

WINDOW_S: Final = 600.0  # an edit that comes back within it is not undone again before its end
_SHOWN: Final = 3  # fields in a message
# Lists that the API server merges by these keys: entries of others may stand beside ours. All other lists are ours whole.
_MERGED: Final[Mapping[str, tuple[str, ...]]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "volumeMounts": ("mountPath",),
    "ownerReferences": ("uid",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
# Maps that the API server takes as one value: one more label in a Service's selector, and it selects nothing.
_WHOLE: Final = frozenset({"selector", "nodeSelector", "matchLabels", "podSelector", "namespaceSelector"})


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done about one child."""

    action: Apply | None = None
    insists: str = ""  # who keeps changing what
    wake_after_s: float | None = None


def settle(rendered: Raw, observed: Raw | None, now_s: float) -> Outcome:
    """`rendered` without digest; it is added here."""
    mark = digest(rendered)
    marked = _annotated(rendered, {A_APPLIED: mark})
    what = f"{rendered['kind']} {rendered['metadata']['name']}"
    if observed is None:
        return Outcome(action=Apply(object=marked, reason=f"{what} does not exist", absent=True))
    annotations = (observed["metadata"].get("annotations")) or {}
    if annotations.get(A_APPLIED) != mark:
        return Outcome(action=Apply(object=marked, reason=f"{what} is not as the spec wants it"))
    content = {name: value for name, value in rendered.items() if name not in ("apiVersion", "kind")}  # lists omit them
    edits = differences(content, observed)
    if not edits:
        return Outcome()
    return _put_back(marked, observed, edits, now_s)


def _put_back(marked: Raw, observed: Raw, edits: dict[str, Any], now_s: float) -> Outcome:
    edit = digest(edits)
    what = f"{marked['kind']} {marked['metadata']['name']}: {listed(edits, _SHOWN)}"
    who = _last_editor(observed)
    before, _, at = (observed["metadata"]["annotations"].get(A_PUT_BACK) or "").partition("@")
    left_s = int(at) + WINDOW_S - now_s if before == edit and at.isdecimal() else 0.0
    if left_s > 0:
        return Outcome(insists=f"{who} changed {what} again after it was put back", wake_after_s=left_s)
    noted = _annotated(marked, {A_PUT_BACK: f"{edit}@{now_s:.0f}"})
    return Outcome(action=Apply(object=noted, reason=f"{who} changed {what}"))


def differences(ours: Any, theirs: Any, path: str = "") -> dict[str, Any]:
    """Fields of ours that have another value, by path: what an apply would change. What stands beside them is not ours."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found: dict[str, Any] = {}
        for name, value in ours.items():
            if name in theirs or not _omitted(value):
                found |= differences(value, theirs.get(name), f"{path}.{name}" if path else name)
        added = theirs.keys() - ours.keys() if path.rpartition(".")[2] in _WHOLE else ()
        return found | {f"{path}.{name}": theirs[name] for name in sorted(added)}
    if isinstance(ours, list) and isinstance(theirs, list):
        return _list_differences(ours, theirs, path)
    return {} if _equal(ours, theirs) else {path: theirs}


def _list_differences(ours: list[Any], theirs: list[Any], path: str) -> dict[str, Any]:
    keys = _MERGED.get(path.rpartition(".")[2])
    if keys is None and len(ours) != len(theirs):
        return {path: theirs}
    found: dict[str, Any] = {}
    for index, value in enumerate(ours):
        if keys is None:
            found |= differences(value, theirs[index], f"{path}[{index}]")
        else:
            other = next((one for one in theirs if all(one.get(key) == value[key] for key in keys)), None)
            found |= differences(value, other, f"{path}[{value[keys[0]]}]")
    return found


def _omitted(value: Any) -> bool:
    """The API server leaves such values out."""
    return value in ("", {}, [])


def _equal(ours: Any, theirs: Any) -> bool:
    if ours == theirs:
        return True
    if isinstance(ours, str) and isinstance(theirs, str | int):
        return _quantity(ours) is not None and _quantity(ours) == _quantity(theirs)
    return False


def _quantity(value: Any) -> Fraction | None:
    """4 and 4000m, 1Gi and 1073741824 are equal; None for what is no quantity."""
    try:
        text = str(Amount.parse(value))
        if text.endswith("m"):
            return Fraction(text[:-1]) / 1000
        return Fraction(text) if text[-1].isdigit() else Fraction(Bytes.parse(text))
    except ValueError:
        return None


def _annotated(obj: Raw, annotations: Raw) -> Raw:
    meta = obj["metadata"]
    return {**obj, "metadata": {**meta, "annotations": {**(meta.get("annotations") or {}), **annotations}}}


def _last_editor(observed: Raw) -> str:
    """The last manager but us of anything but status."""
    others = [
        entry
        for entry in observed["metadata"].get("managedFields") or ()
        if entry.get("manager") != FIELD_MANAGER and entry.get("subresource") != "status"
    ]
    last = max(others, key=lambda entry: seconds(entry["time"]) if entry.get("time") else 0.0, default=None)
    return str(last.get("manager")) if last else "somebody"
