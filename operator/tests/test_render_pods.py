"""Pods as they are rendered: what their programs read of them, and what Kubernetes' restricted profile asks."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from prefixpool.settings import parse
from prefixpool_agent.settings import WorkerSettings
from prefixpool_operator.observed import Raw
from prefixpool_router.settings import RouterSettings
from prefixpool_testing.toy_cluster import ToyCluster, pool

GIB = 1 << 30
_WORKER, _ROUTER = ("containers", 0), ("initContainers", 0)


def template(spec: Raw | None = None) -> Raw:
    cluster = ToyCluster(pool({"replicas": 2, **(spec or {})}))
    cluster.reconcile()
    assert cluster.stateful is not None
    found: Raw = cluster.stateful["spec"]["template"]["spec"]
    return found


def child(kind: str, name: str, spec: Raw | None = None) -> Raw:
    cluster = ToyCluster(pool({"replicas": 2, **(spec or {})}))
    cluster.reconcile()
    return cluster.children[kind, name]


def environment(container: Raw) -> dict[str, str]:
    return {one["name"]: one.get("value", "p-0") for one in container["env"]}


def worker(spec: Raw | None = None) -> WorkerSettings:
    return parse(
        WorkerSettings,
        [],
        environment(template(spec)["containers"][0]),
        prefix="PREFIXPOOL_WORKER",
        parser=argparse.ArgumentParser(),
    )


def router(spec: Raw | None = None) -> RouterSettings:
    return parse(
        RouterSettings,
        [],
        environment(template(spec)["initContainers"][0]),
        prefix="PREFIXPOOL_ROUTER",
        parser=argparse.ArgumentParser(),
    )


FULL: Raw = {
    "model": {
        "source": "/models/smollm2", "servedName": "small", "volume": {"claimName": "weights"},
        "adapters": [{"name": "tuned", "source": "/models/tuned"}],
        "shape": {
            "weights": "257Mi", "maxModelLen": 8192, "hiddenSize": 576, "intermediateSize": 1536, "attentionHeads": 9,
            "vocabularySize": 49152, "kv": [{"kind": "full", "layers": 30, "heads": 3, "valuesPerToken": 128}],
        },
    },
    "engine": {"maxModelLen": 4096, "blockSize": 64, "maxNumSeqs": 8, "startupTimeoutSeconds": 300, "extraArgs": ["--a b"]},
    "kvCache": {"dtype": "fp8", "host": {"memory": "1Gi"}, "eviction": "arc", "disk": {"size": "2Gi"}},
    "router": {
        "policy": "chwbl", "limits": {"maxInflight": 5, "maxBody": "1Mi", "queueTimeoutSeconds": 3}, "accessLog": True,
    },
    "auth": {"keysSecret": "clients"},
    "drain": {"timeoutSeconds": 7},
}  # fmt: skip


def test_the_worker_reads_what_the_spec_says() -> None:
    found = worker(FULL)
    assert (found.replica, found.model, found.served_model_name) == ("p-0", "/models/smollm2", "small")
    assert (found.device, found.max_model_len, found.block_tokens, found.max_num_seqs) == ("cpu", 4096, 64, 8)
    assert (found.host_kv_bytes, found.disk_kv_bytes, found.disk_kv_shared) == (GIB, 2 * GIB, False)
    assert (found.kv_eviction, found.kv_cache_dtype) == ("arc", "fp8")
    assert (found.startup_timeout_s, found.drain_timeout_s, found.log_files) == (300, 7, False)
    assert found.engine_args == "--enable-lora --lora-modules tuned=/models/tuned '--a b'"


def test_the_router_reads_what_the_spec_says() -> None:
    found = router(FULL)
    assert (found.kubernetes_service, found.served_models) == ("chat-replicas", ("small", "tuned"))
    assert (found.policy, found.max_inflight, found.max_body_bytes, found.queue_timeout_s) == ("chwbl", 5, 1 << 20, 3)
    assert (found.keys_file, found.engine_key_file) == ("/etc/prefixpool/auth/keys", "/etc/prefixpool/keys/engine")
    assert (found.drain_timeout_s, found.access_log) == (7, True)
    assert not found.ready_without_replicas


def test_pods_of_ipv6_first_clusters_were_never_ready_because_they_listened_on_ipv4_alone() -> None:
    found = router(FULL)
    assert (worker(FULL).host, found.host, found.admin_host) == ("::", "::", "::")


def test_every_variable_of_ours_is_a_setting() -> None:
    """A misspelt one would be passed over in silence."""
    spec = template(FULL)
    for (group, index), prefix, settings in (
        (_WORKER, "PREFIXPOOL_WORKER_", WorkerSettings),
        (_ROUTER, "PREFIXPOOL_ROUTER_", RouterSettings),
    ):
        names = {name for name in environment(spec[group][index]) if name.startswith("PREFIXPOOL_")}
        assert names <= {prefix + field.upper() for field in settings.__struct_fields__}


def test_on_cpus_the_engine_takes_the_planned_bytes_and_on_gpus_it_measures() -> None:
    assert worker().kv_cache_bytes == 1407467520
    gpu = {"accelerator": {"memory": "22Gi"}}
    assert worker(gpu).kv_cache_bytes == 0
    assert worker(gpu).device == "cuda"


def test_the_sim_takes_planned_blocks() -> None:
    assert worker({"engine": {"kind": "sim"}}).device_blocks > 1000


def test_the_grace_period_covers_both_drains() -> None:
    assert template(FULL)["terminationGracePeriodSeconds"] == 7 + 10 + 5 + 5 + 7 + 15


def test_nothing_runs_as_root_or_writes_to_its_image() -> None:
    spec = template(FULL)
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*spec["containers"], *spec["initContainers"]):
        rights = container["securityContext"]
        assert (rights["allowPrivilegeEscalation"], rights["readOnlyRootFilesystem"]) == (False, True)
        assert rights["capabilities"] == {"drop": ["ALL"]}


def test_the_token_and_the_salt_reach_the_router_only() -> None:
    spec = template(FULL)
    mounts = {
        one["name"]: {mount["name"] for mount in one["volumeMounts"]}
        for one in (*spec["containers"], *spec["initContainers"])
    }
    assert {"token", "keys", "auth"} <= mounts["router"]
    assert not {"token", "keys", "auth"} & mounts["worker"]
    engine_key = next(one for one in spec["volumes"] if one["name"] == "engine-key")
    assert [item["key"] for item in engine_key["secret"]["items"]] == ["engine"]
    assert not spec["automountServiceAccountToken"]
    assert not spec["enableServiceLinks"]


def test_every_mount_has_a_volume_and_every_path_is_mounted_once() -> None:
    spec = template(FULL)
    volumes = [one["name"] for one in spec["volumes"]]
    assert len(volumes) == len(set(volumes))
    for container in (*spec["containers"], *spec["initContainers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(paths) == len(set(paths))


def test_memory_and_shared_memory_are_sized_with_the_host_tier() -> None:
    gpu = {"accelerator": {"memory": "22Gi"}}
    small, large = template(gpu), template({**gpu, "kvCache": {"host": {"memory": "10Gi"}}})

    def memory(spec: Raw) -> tuple[int, int]:
        limits = spec["containers"][0]["resources"]
        assert limits["requests"]["memory"] == limits["limits"]["memory"]
        shm = next(one for one in spec["volumes"] if one["name"] == "shm")
        return int(limits["limits"]["memory"]), int(shm["emptyDir"]["sizeLimit"])

    assert [after - before for before, after in zip(memory(small), memory(large), strict=True)] == [12 * GIB, 12 * GIB]
    assert large["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in large["tolerations"]


def test_nodes_whose_own_runtime_knows_no_devices_are_told_of_another_by_replicas_alone() -> None:
    """k3s and others have NVIDIA's runtime beside their own: engines found no device, and pools could not name it."""
    spec = {"accelerator": {"memory": "22Gi"}, "placement": {"runtimeClassName": "nvidia"}}
    assert template(spec)["runtimeClassName"] == "nvidia"
    apart = child("Deployment", "chat-router", {**spec, "router": {"mode": "Deployment"}})
    assert "runtimeClassName" not in apart["spec"]["template"]["spec"]
    assert "runtimeClassName" not in template({"accelerator": {"memory": "22Gi"}})


@pytest.mark.parametrize(
    ("memory", "engine", "inflight"),
    [
        ("22Gi", {}, 256),
        ("143771Mi", {}, 1024),
        ("143771Mi", {"maxNumSeqs": 512}, 512),
        ("22Gi", {"maxNumSeqs": 8}, 256),
    ],
)
def test_engines_that_compute_a_thousand_sequences_at_once_were_let_have_256(
    memory: str, engine: Raw, inflight: int
) -> None:
    assert worker({"accelerator": {"memory": memory}, "engine": engine}).max_inflight == inflight


def test_engines_asked_for_no_core_and_got_what_other_pods_of_a_busy_node_left() -> None:
    model = {"source": "meta-llama/Llama-3.1-8B"}
    gpus = {"model": model, "accelerator": {"memory": "80Gi", "tensorParallel": 4}}
    found = template(gpus)["containers"][0]["resources"]
    assert found["requests"]["cpu"] == "5"
    assert "cpu" not in found["limits"]
    own = {"resources": {"requests": {"cpu": "16"}}}
    assert template({**gpus, "engine": own})["containers"][0]["resources"]["requests"]["cpu"] == "16"
    assert "cpu" not in template({**gpus, "engine": {"kind": "sim"}})["containers"][0]["resources"]["requests"]


def test_parts_of_devices_are_on_nodes_that_are_tainted_as_those_with_whole_ones() -> None:
    part = "nvidia.com/mig-1g.10gb"
    tolerated = {one["key"] for one in template({"accelerator": {"resource": part, "memory": "9Gi"}})["tolerations"]}
    assert tolerated == {part, "nvidia.com/gpu"}


@pytest.mark.parametrize(
    ("given", "request_", "limit"),
    [
        ({"limits": {"memory": "2Gi"}}, "2Gi", "2Gi"),
        ({"requests": {"memory": "1Gi"}}, "1Gi", "1Gi"),
        ({"requests": {"memory": "1Gi"}, "limits": {"memory": "3Gi"}}, "1Gi", "3Gi"),
    ],
)
def test_what_a_person_gives_wins(given: Raw, request_: str, limit: str) -> None:
    found = template({"engine": {"resources": given}})["containers"][0]["resources"]
    assert (found["requests"]["memory"], found["limits"]["memory"]) == (request_, limit)


def test_disks() -> None:
    host = {"host": {"memory": "1Gi"}}
    own = {"kvCache": {**host, "disk": {"size": "20Gi", "storageClassName": "fast"}}}
    claims = child("StatefulSet", "chat", own)["spec"]["volumeClaimTemplates"]
    assert claims[0]["spec"]["resources"]["requests"]["storage"] == str(22 * GIB)  # room for the file system, and some spare
    assert worker(own).disk_kv_dir == "/var/lib/prefixpool/disk"
    shared = template({"kvCache": {**host, "disk": {"size": "20Gi", "sharedClaimName": "all"}}})
    assert {"name": "disk", "persistentVolumeClaim": {"claimName": "all"}} in shared["volumes"]
    local = template({"kvCache": {**host, "disk": {"size": "20Gi"}}})
    assert {"name": "disk", "emptyDir": {"sizeLimit": str(22 * GIB)}} in local["volumes"]
    assert int(local["containers"][0]["resources"]["requests"]["ephemeral-storage"]) > 22 * GIB


HUB: Raw = {"source": "HuggingFaceTB/SmolLM2-135M-Instruct", "revision": "v1"}


def test_downloads_are_kept_where_all_replicas_find_them() -> None:
    alone, shared = (template({"model": {**HUB, **more}}) for more in ({}, {"cache": {"claimName": "weights"}}))
    container, before = shared["containers"][0], alone["containers"][0]
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "weights"}} in shared["volumes"]
    (path,) = (one["mountPath"] for one in container["volumeMounts"] if one["name"] == "cache")
    assert environment(container)["HF_HUB_CACHE"] == path
    assert shared["securityContext"]["fsGroup"] == shared["securityContext"]["runAsGroup"]
    assert "HF_HUB_CACHE" not in environment(before)
    scratch, less = (one["resources"]["requests"]["ephemeral-storage"] for one in (before, container))
    assert int(scratch) > int(less)


def test_a_revision_is_the_workers_to_fetch() -> None:
    found = worker({"model": HUB})
    assert (found.model, found.revision, found.engine_args) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "v1", "")


def test_a_start_that_downloads_may_take_longer() -> None:
    shape = {**FULL["model"]["shape"], "weights": "1Gi"}
    from_hub, from_volume = (
        worker({"model": {"shape": shape, **model}}).startup_timeout_s
        for model in ({"source": "org/model"}, {"source": "/models/m", "volume": {"claimName": "c"}})
    )
    assert from_hub - from_volume == pytest.approx(GIB / 10e6 - GIB / 100e6, abs=2)


def test_kubernetes_ended_starts_whose_download_took_long() -> None:
    shape = FULL["model"]["shape"]
    from_hub, from_volume = (
        template({"model": {"shape": shape, **model}})["containers"][0]["startupProbe"]["httpGet"]["path"]
        for model in ({"source": "org/model"}, {"source": "/models/m", "volume": {"claimName": "c"}})
    )
    assert (from_hub, from_volume) == ("/readyz?download=1", "/readyz")


def test_variables_of_the_spec_win_over_ours_and_come_from_secrets() -> None:
    env = [
        {"name": "HOME", "value": "/tmp/else"},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "mine", "key": "k"}}},
    ]
    found = template({"engine": {"env": env}, "model": {"source": "a/smollm2-135m", "tokenSecret": "hub"}})["containers"][0][
        "env"
    ]
    by_name: dict[str, Any] = {one["name"]: one for one in found}
    assert len(by_name) == len(found)
    assert by_name["HOME"]["value"] == "/tmp/else"
    assert by_name["KEY"]["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "k"}
    assert by_name["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}


def test_routers_of_their_own() -> None:
    spec = {"router": {"mode": "Deployment", "replicas": 3}, "replicas": 0}
    deployment = child("Deployment", "chat-router", spec)["spec"]
    assert deployment["replicas"] == 3
    container = deployment["template"]["spec"]["containers"][0]
    assert environment(container)["PREFIXPOOL_ROUTER_READY_WITHOUT_REPLICAS"] == "true"
    assert "restartPolicy" not in container
    assert "initContainers" not in template(spec)
    assert template(spec)["terminationGracePeriodSeconds"] == 60 + 10 + 5 + 15
    assert child("Service", "chat", spec)["spec"]["selector"]["app.kubernetes.io/component"] == "router"


def test_dollars_in_arguments_reach_the_engine_as_they_were_written() -> None:
    """The kubelet made one of two, and put variables in."""
    found = worker({"engine": {"extraArgs": ["--x=^a$$|$(HOME)$"]}})
    assert found.engine_args.replace("$$", "$") == "'--x=^a$$|$(HOME)$'"


def test_nodes_that_are_drained_at_once_do_not_take_all_routers() -> None:
    """Clients are sent to routers only, and only replicas had a budget."""
    budget = child("PodDisruptionBudget", "chat-router", {"router": {"mode": "Deployment"}})["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"]["app.kubernetes.io/component"] == "router"


def test_children_belong_to_the_pool_and_bear_its_labels() -> None:
    cluster = ToyCluster(pool({"replicas": 1}))
    cluster.reconcile()
    kinds = {kind for kind, _ in cluster.children}
    assert kinds == {
        "StatefulSet", "Service", "PodDisruptionBudget", "ConfigMap", "ServiceAccount", "Role", "RoleBinding",
        "NetworkPolicy", "Secret",
    }  # fmt: skip
    for obj in cluster.children.values():
        meta = obj["metadata"]
        assert meta["labels"]["prefixpool.dev/pool"] == "chat"
        assert [(ref["uid"], ref["controller"]) for ref in meta["ownerReferences"]] == [("pool-uid", True)]
