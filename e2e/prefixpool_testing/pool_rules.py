"""Every rule of the InferencePool, with specs that keep and that break it: for CEL, for Python, for a real API server."""

from copy import deepcopy
from typing import Any

from prefixpool.api.resource import API_VERSION, KIND

Spec = dict[str, Any]

FIGURES = {
    "weights": "15Gi", "maxModelLen": 8192, "hiddenSize": 4096, "intermediateSize": 14336, "attentionHeads": 32,
    "vocabularySize": 128256,
}  # fmt: skip
FULL = {"kind": "full", "layers": 32, "heads": 8, "valuesPerToken": 256}
STATE = {"kind": "state", "layers": 3, "stateBytes": "1Mi"}
HOST = {"host": {"memory": "64Gi"}}
SESSIONS = {"sessions": 100, "tokensPerSession": 8000}

# The message's beginning, specs that keep the rule, specs that break it (and no other).
RULES: list[tuple[str, list[Spec], list[Spec]]] = [
    (
        "code from the Hub runs only at a fixed revision",
        [{"model": {"trustRemoteCode": True, "revision": "abc"}}, {"model": {"trustRemoteCode": False}}],
        [{"model": {"trustRemoteCode": True}}],
    ),
    (
        "with a volume, model.source is a path in it",
        [{"model": {"source": source, "volume": {"claimName": "c"}}} for source in ("/models", "/models/a")],
        [{"model": {"source": source, "volume": {"claimName": "c"}}} for source in ("a/b", "/data/a", "/models-2/a")],
    ),
    (
        "a volume needs no token",
        [{"model": {"tokenSecret": "t"}}],
        [{"model": {"source": "/models/a", "volume": {"claimName": "c"}, "tokenSecret": "t"}}],
    ),
    (
        "a cache keeps what comes from the Hub",
        [{"model": {"cache": {"claimName": "c"}, "revision": "main", "tokenSecret": "t"}}],
        [
            {"model": {"cache": {"claimName": "c"}, "source": "/opt/a"}},
            {"model": {"cache": {"claimName": "c"}, "source": "/models/a", "volume": {"claimName": "c"}}},
        ],
    ),
    (
        "a revision is one of a Hub repository",
        [{"model": {"revision": "main"}}, {"model": {"source": "/opt/a"}}],
        [{"model": {"source": "/opt/a", "revision": "main"}}],
    ),
    (
        "layers of kind state need stateBytes",
        [{"model": {"shape": {**FIGURES, "kv": [FULL, STATE]}}}],
        [
            {"model": {"shape": {**FIGURES, "kv": [kv]}}}
            for kv in (
                {"kind": "state", "layers": 1}, {"kind": "latent", "layers": 1}, {**FULL, "stateBytes": 5},
                {**STATE, "valuesPerToken": 5},
            )
        ],
    ),
    (
        "layers of kind window or chunk need window",
        [{"model": {"shape": {**FIGURES, "kv": [{**FULL, "kind": kind, "window": 1024}]}}} for kind in ("window", "chunk")],
        [
            {"model": {"shape": {**FIGURES, "kv": [kv]}}}
            for kv in ({**FULL, "kind": "window"}, {**FULL, "kind": "chunk"}, {**FULL, "window": 5}, {**STATE, "window": 5})
        ],
    ),
    (
        "a variable has value or valueFrom",
        [{"engine": {"env": [{"name": "A", "value": ""}, {"name": "B"}]}}],
        [{"engine": {"env": [{"name": "A", "value": "", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}}],
    ),
    (
        "variables named PREFIXPOOL_… are the operator's",
        [{"engine": {"env": [{"name": "MY_PREFIXPOOL_", "value": "1"}]}}],
        [{"engine": {"env": [{"name": "PREFIXPOOL_RUN_DIR", "value": "1"}]}}],
    ),
    (
        "vLLM takes block sizes that are multiples of 8",
        [{"engine": {"blockSize": 32}}, {"engine": {"blockSize": 5, "kind": "sim"}}],
        [{"engine": {"blockSize": 5}}],
    ),
    (
        "devices have names with a slash",
        [{"accelerator": {"resource": name, "memory": "4Gi"}} for name in ("cpu", "amd.com/gpu")],
        [{"accelerator": {"resource": name, "memory": "4Gi"}} for name in ("memory", "gpu")],
    ),
    (
        "on CPUs, accelerator.memory says",
        [{"accelerator": {"resource": "cpu", "memory": "4Gi"}}],
        [{"accelerator": {"resource": "cpu"}}],
    ),
    (
        "a replica on CPUs is one device",
        [{"accelerator": {"tensorParallel": 8}}],
        [{"accelerator": {"resource": "cpu", "memory": "4Gi", f"{kind}Parallel": 2}} for kind in ("tensor", "pipeline")],
    ),
    (
        "a toleration without key needs operator Exists",
        [{"placement": {"tolerations": [{"operator": "Exists"}, {"key": "a", "value": "b"}]}}],
        [{"placement": {"tolerations": [{"value": "b"}]}}],
    ),
    (
        "a disk is made for each replica",
        [{"kvCache": {**HOST, "disk": {"size": "1Ti", field: "x"}}} for field in ("storageClassName", "sharedClaimName")],
        [{"kvCache": {**HOST, "disk": {"size": "1Ti", "storageClassName": "x", "sharedClaimName": "y"}}}],
    ),
    (
        "blocks pass through host memory on their way to disk",
        [{"kvCache": {**HOST, "disk": {"size": "1Ti"}}}],
        [{"kvCache": {"disk": {"size": "1Ti"}}}],
    ),
    (
        "eviction is about the host tier",
        [{"kvCache": {**HOST, "eviction": order}} for order in ("worth", "lru", "arc")],
        [{"kvCache": {"eviction": "lru"}}],
    ),
    (
        "a budget is residentTokens, or sessions",
        [{"kvBudget": {"residentTokens": 5}}, {"kvBudget": SESSIONS}],
        [{"kvBudget": {}}, {"kvBudget": {"residentTokens": 5, **SESSIONS}}],
    ),
    (
        "sessions and tokensPerSession are needed together",
        [{"kvBudget": SESSIONS}],
        [{"kvBudget": {"sessions": 5}}, {"kvBudget": {"tokensPerSession": 5}}],
    ),
    (
        "in Sidecar mode each replica has its router",
        [{"router": {"mode": "Deployment", "replicas": 3}}, {"router": {"mode": "Sidecar"}}],
        [{"router": {"replicas": 3}}],
    ),
    (
        "a budget in the host tier needs one",
        [{"kvBudget": {**SESSIONS, "tier": "host"}, "kvCache": HOST}],
        [{"kvBudget": {**SESSIONS, "tier": "host"}}],
    ),
    (
        "minReplicas and maxReplicas bound what kvBudget asks for",
        [{"kvBudget": SESSIONS, "minReplicas": 1, "maxReplicas": 3}],
        [{"minReplicas": 1}, {"maxReplicas": 1, "replicas": 1}],
    ),
    (
        "minReplicas is above maxReplicas",
        [{"kvBudget": SESSIONS, "minReplicas": 3, "maxReplicas": 3}],
        [{"kvBudget": SESSIONS, "minReplicas": 4, "maxReplicas": 3}],
    ),
    (
        "vLLM on CPUs takes block sizes",
        [
            {"accelerator": {"resource": "cpu", "memory": "4Gi"}, "engine": engine}
            for engine in ({"blockSize": 64}, {"blockSize": 8, "kind": "sim"}, {})
        ],
        [{"accelerator": {"resource": "cpu", "memory": "4Gi"}, "engine": {"blockSize": 16}}],
    ),
    (
        "sessions are longer than the longest sequence",
        [
            {"kvBudget": SESSIONS, "engine": {"maxModelLen": 8000}},
            {"kvBudget": {"residentTokens": 9}, "engine": {"maxModelLen": 8}},
        ],
        [{"kvBudget": SESSIONS, "engine": {"maxModelLen": 7999}}],
    ),
]  # fmt: skip

Change = tuple[str, Spec, list[Spec], list[Spec]]


def _moved_disk(field: str) -> Change:
    def cache(disk: Any) -> Spec:
        return {"kvCache": {**HOST, "disk": disk}}

    good = [cache({"size": "2Ti", field: "x"}), cache(None)]
    bad = [cache({"size": "1Ti", field: other}) for other in ("y", None)]
    return f"{field} cannot change", cache({"size": "1Ti", field: "x"}), good, bad


# The message's beginning, a spec, changes that pass, changes that are refused.
IMMUTABLE: list[Change] = [
    ("source cannot change", {}, [{"model": {"revision": "v2"}}], [{"model": {"source": "other/model"}}]),
    ("resource cannot change", {}, [{"accelerator": {"memory": "80Gi"}}], [{"accelerator": {"resource": "amd.com/gpu"}}]),
    ("tensorParallel cannot change", {}, [], [{"accelerator": {"tensorParallel": 2}}]),
    ("pipelineParallel cannot change", {}, [], [{"accelerator": {"pipelineParallel": 2}}]),
    _moved_disk("storageClassName"),
    _moved_disk("sharedClaimName"),
]


def merged(base: Any, change: Any) -> Any:
    """As `kubectl apply` would: None removes a field."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return deepcopy(change)
    found = {**base, **{key: merged(base.get(key, {}), value) for key, value in change.items()}}
    return {key: value for key, value in found.items() if value is not None}


def pool(change: Spec, name: str = "llama") -> dict[str, Any]:
    """The least pool, changed."""
    head = {"apiVersion": API_VERSION, "kind": KIND}
    return {**head, "metadata": {"name": name}, "spec": merged({"model": {"source": "meta-llama/Llama-3.1-8B"}}, change)}
