"""`plan` never raises, whatever is missing in what it sees, and it is a function of that alone."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixpool_operator.plan import plan
from prefixpool_testing.toy_cluster import ToyCluster, pool

# The API server never leaves these out.
_NEEDED = frozenset(("name", "namespace", "uid", "generation", "kind", "metadata", "spec", "template", "type", "status"))


def busy() -> ToyCluster:
    """In the middle of everything."""
    spec = {"replicas": 3, "kvCache": {"host": {"memory": "1Gi"}, "disk": {"size": "1Gi", "storageClassName": "s"}}}
    cluster = ToyCluster(pool(spec))
    cluster.run()
    cluster.crash("chat-0", message="no")
    cluster.terminate("chat-1")
    cluster.edit("Service", "chat", lambda obj: obj["spec"].update(selector={"a": "b"}))
    cluster.edit_spec("kubectl", engine={"extraArgs": ["--x"]})
    cluster.reconcile()
    assert cluster.stateful is not None
    claim = cluster.stateful["spec"]["volumeClaimTemplates"][0]["spec"]
    cluster.claims = [{"metadata": {"name": "disk-chat-0", "uid": "c"}, "spec": claim}]
    return cluster


_BUSY = busy()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything that may be missing."""
    found: list[tuple[Any, ...]] = []
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        found += [] if key in _NEEDED else [(*path, key)]
        found += places(inner, (*path, key))
    return found


def without(value: Any, path: tuple[Any, ...], instead: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    if instead is None:
        del value[path[-1]]
    else:
        value[path[-1]] = instead


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_something_is_missing(data: st.DataObject) -> None:
    cluster = copy.deepcopy(_BUSY)
    objects = [*cluster.children.values(), *cluster.pods.values(), *cluster.claims]
    if data.draw(st.booleans()):
        cluster.pods["chat-2"].pop("status")
    for _ in range(data.draw(st.integers(1, 3))):
        victim = data.draw(st.sampled_from(objects))
        without(victim, data.draw(st.sampled_from(places(victim))), None)
    observed = cluster.observe()
    assert plan(observed) == plan(observed)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_something_in_the_pool_is_odd(data: st.DataObject) -> None:
    cluster = copy.deepcopy(_BUSY)
    there = [path for path in places(cluster.pool) if path[0] in ("spec", "status")]
    odd = st.sampled_from([None, 0, "", "text", -1, [], {}, [1], {"a": 1}, True])
    without(cluster.pool, data.draw(st.sampled_from(there)), data.draw(odd))
    found = cluster.plan()
    accepted = next(one for one in found.status["conditions"] if one["type"] == "Accepted")
    assert accepted["status"] == "True" or not found.actions
