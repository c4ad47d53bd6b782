"""Sized: where figures come from, what does not fit, what engines correct."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from prefixpool.sizing import inspection
from prefixpool.wire import Memory, State
from prefixpool_operator.actions import Apply, Delete
from prefixpool_operator.observed import Node, Raw
from prefixpool_operator.troubles import LOOK_S
from prefixpool_testing.agent_info import info
from prefixpool_testing.toy_cluster import STAMP, ToyCluster, pool

GPU = "nvidia.com/gpu"
UNKNOWN = {"model": {"source": "someone/unheard-of"}}
CONFIG = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "intermediate_size": 1536, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


def node(name: str = "n1", gib: float = 22.5, **changes: Any) -> Node:
    values = {"allocatable": {GPU: 8}, "accelerator": "NVIDIA-L4", "accelerator_bytes": int(gib * (1 << 30))}
    return Node(name=name, ready=True, **(values | changes))


def on_gpus(model: str, *nodes: Node, **spec: Any) -> ToyCluster:
    cluster = ToyCluster(pool({"model": {"source": model}, "replicas": 1, "accelerator": {}, **spec}), nodes=nodes or None)
    cluster.reconcile()
    return cluster


def test_every_figure() -> None:
    cluster = ToyCluster(
        pool(
            {
                "kvCache": {"host": {"memory": "8Gi"}, "disk": {"size": "50Gi"}},
                "kvBudget": {"sessions": 100, "tokensPerSession": 2000},
            }
        )
    )
    cluster.run()
    sizing = cluster.pool["status"]["sizing"]
    assert set(sizing) == {
        "weightsBytes", "kvBytesPerToken", "devicePerReplica", "hostPerReplica", "diskPerReplica", "concurrentSequences",
        "maxModelLen", "sessionsPerReplica", "replicas", "limitedBy", "source",
    }  # fmt: skip
    assert (sizing["source"], sizing["kvBytesPerToken"], sizing["maxModelLen"]) == ("Planned", 23040, 8192)
    assert sizing["hostPerReplica"]["bytes"] <= 8 << 30
    assert cluster.pool["status"]["shapeSource"] == "Catalogue"


def test_a_model_that_does_not_fit_starts_nothing_and_says_what_would() -> None:
    cluster = on_gpus("meta-llama/Llama-3.1-70B-Instruct", node())
    assert cluster.children == {}
    assert cluster.said()["Sized"] == "False DoesNotFit"
    message = cluster.condition("Sized")["message"]
    assert "GiB are missing" in message
    assert "tensor parallelism 16" in message
    assert cluster.said()["Progressing"] == "True Waiting"
    assert cluster.said()["Available"] == "False NoneReady"
    assert cluster.pool["status"]["sizing"]["limitedBy"] == "Weights"


def test_a_change_that_does_not_fit_leaves_what_runs() -> None:
    cluster = ToyCluster(pool({"replicas": 2}))
    cluster.run()
    cluster.edit_spec("kubectl", accelerator={"resource": "cpu", "memory": "1Gi"})
    assert cluster.reconcile().actions == ()
    assert cluster.said()["Sized"] == "False DoesNotFit"
    assert cluster.said()["Available"] == "True ReplicasReady"


def test_settings_that_contradict_each_other() -> None:
    cluster = on_gpus("meta-llama/Llama-3.1-8B", node(), accelerator={"tensorParallel": 3})
    assert cluster.said()["Sized"] == "False Refused"
    assert "tensor parallelism may be" in cluster.condition("Sized")["message"]


def test_the_smallest_device_that_a_pod_may_get_counts() -> None:
    nodes = (node("n1", 80), node("n2", 40), node("n3", 10, labels={"zone": "b"}), node("n4", 5, shared=True))
    cluster = on_gpus("meta-llama/Llama-3.1-8B", *nodes, accelerator={}, placement={"nodeSelector": {"zone": "b"}})
    assert cluster.said()["Sized"] == "False DoesNotFit"
    cluster = on_gpus("meta-llama/Llama-3.1-8B", node("n1", 80), node("n2", 40), node("n4", 5, shared=True))
    remembered = json.loads(cluster.children["ConfigMap", "chat-config"]["data"]["planned"])
    assert remembered["device"]["memoryBytes"] == 40 << 30


def test_a_slice_of_a_device_is_not_sized_as_the_whole_device() -> None:
    """With unlike slices on a node, its labels `nvidia.com/gpu…` are of the whole devices: far too much fitted."""
    part = "nvidia.com/mig-1g.10gb"
    mixed = node(gib=80, allocatable={part: 7}, parts={part: 9 << 30}, accelerator="NVIDIA-A100-SXM4-80GB")
    cluster = on_gpus("meta-llama/Llama-3.1-8B", mixed, accelerator={"resource": part})
    assert cluster.said()["Sized"] == "False DoesNotFit"
    cluster = on_gpus("meta-llama/Llama-3.2-1B", mixed, accelerator={"resource": part}, engine={"maxModelLen": 8192})
    remembered = json.loads(cluster.children["ConfigMap", "chat-config"]["data"]["planned"])
    assert remembered["device"]["memoryBytes"] == 9 << 30
    cluster = on_gpus("meta-llama/Llama-3.2-1B", node(allocatable={part: 7}), accelerator={"resource": part})
    assert cluster.said()["Sized"] == "Unknown DeviceUnknown", "nobody tells how large a slice is"


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ((), "may not read nodes"),
        ((node(allocatable={}),), f"offers 1 {GPU}"),
        ((node(shared=True),), "shared"),
        ((node(gib=0),), "accelerator.memory"),
    ],
)
def test_no_device_is_known(nodes: tuple[Node, ...], why: str) -> None:
    cluster = on_gpus("meta-llama/Llama-3.1-8B", *nodes)
    assert cluster.said()["Sized"] == "Unknown DeviceUnknown"
    assert why in cluster.condition("Sized")["message"]
    assert cluster.children == {}


def test_a_plan_outlives_the_nodes_it_was_made_from() -> None:
    cluster = on_gpus("meta-llama/Llama-3.1-8B", node(), engine={"maxModelLen": 8192})
    cluster.run()
    cluster.nodes = ()
    assert cluster.plan().actions == ()
    cluster.edit_spec("hpa", replicas=2)
    cluster.run()
    assert len(cluster.pods) == 2


def test_measured_blocks_correct_the_plan_once_and_do_not_swing() -> None:
    cluster = ToyCluster(pool({"replicas": 2}))
    cluster.run()
    cluster.infos = {"chat-0": info("chat-0", device_blocks=1900), "chat-1": info("chat-1", device_blocks=1950)}
    cluster.run()
    sizing = cluster.pool["status"]["sizing"]
    assert (sizing["source"], sizing["devicePerReplica"]["blocks"]) == ("Measured", 1901)
    for infos in ({}, {"chat-1": info("chat-1", device_blocks=1950)}, {"chat-0": info("chat-0", state=State.STARTING)}):
        cluster.infos = infos
        found = cluster.plan()
        assert (found.actions, found.status_changed) == ((), False)


def test_an_engine_that_chose_blocks_four_times_as_large_seemed_to_have_a_quarter_of_the_memory() -> None:
    cluster = on_gpus("meta-llama/Llama-3.1-8B", node(), engine={"maxModelLen": 8192})
    cluster.run()
    planned = cluster.pool["status"]["sizing"]["devicePerReplica"]["blocks"]
    cluster.infos = {"chat-0": info("chat-0", device_blocks=planned // 4, block_tokens=64)}
    cluster.run()
    sizing = cluster.pool["status"]["sizing"]
    assert sizing["source"] == "Measured"
    assert sizing["devicePerReplica"]["blocks"] == planned // 4 * 4 + 1
    assert "Engines report" not in cluster.condition("Sized")["message"]


def test_a_great_difference_is_told() -> None:
    cluster = ToyCluster(pool({"replicas": 1}))
    cluster.run()
    cluster.infos = {"chat-0": info("chat-0", device_blocks=1499)}
    cluster.run()
    assert "Engines report 1,500 blocks, 21 % fewer than the 1,909 planned." in cluster.condition("Sized")["message"]


def test_measures_of_a_former_spec_do_not_count() -> None:
    cluster = ToyCluster(pool({"replicas": 1}))
    cluster.run()
    cluster.infos = {"chat-0": info("chat-0", device_blocks=1499)}
    cluster.run()
    cluster.edit_spec("kubectl", kvCache={"dtype": "fp8"})
    cluster.reconcile()
    assert cluster.said()["Sized"] == "True Planned"
    cluster.controllers()
    cluster.reconcile()
    assert cluster.said()["Sized"] == "True Planned"


def test_nodes_with_too_little_memory_are_told_before_a_pod_waits_for_one() -> None:
    small = node(allocatable={GPU: 8, "memory": 16 << 30})
    spec = {"engine": {"maxModelLen": 8192}, "kvCache": {"host": {"memory": "64Gi"}}}
    cluster = on_gpus("meta-llama/Llama-3.1-8B", small, **spec)
    assert cluster.said()["Sized"] == "True Planned"
    assert "the largest node that it may run on has 16.0 GiB" in cluster.condition("Sized")["message"]
    given = {**spec, "engine": {"maxModelLen": 8192, "resources": {"limits": {"memory": "12Gi"}}}}
    assert "largest node" not in on_gpus("meta-llama/Llama-3.1-8B", small, **given).condition("Sized")["message"]


def ended(job: Raw, message: str, uid: str = "inspect-pod") -> Raw:
    """A pod of an inspection that has ended with these words."""
    return {
        "metadata": {
            "name": uid,
            "uid": uid,
            "labels": job["spec"]["template"]["metadata"]["labels"],
            "ownerReferences": [{"uid": job["metadata"]["uid"]}],
            "creationTimestamp": STAMP,
        },
        "spec": job["spec"]["template"]["spec"],
        "status": {"containerStatuses": [{"name": "inspect", "state": {"terminated": {"message": message}}}]},
    }


def inspecting() -> tuple[ToyCluster, Raw]:
    cluster = ToyCluster(pool({"replicas": 1, **UNKNOWN}))
    found = cluster.reconcile()
    assert [one.object["kind"] for one in found.actions if isinstance(one, Apply)] == ["Job"]
    assert cluster.said()["Sized"] == "Unknown Inspecting"
    assert cluster.plan().actions == ()
    return cluster, cluster.children["Job", "chat-inspect"]


def test_an_unknown_model_is_inspected_and_remembered() -> None:
    cluster, job = inspecting()
    document = inspection.write(inspection.inspection(CONFIG, 269_030_016, "abc"))
    cluster.pods["inspect-pod"] = ended(job, document.decode())
    cluster.run()
    assert cluster.said()["Sized"] == "True Planned"
    assert cluster.pool["status"]["shapeSource"] == "Inspection"
    assert ("Job", "chat-inspect") not in cluster.children
    del cluster.pods["inspect-pod"]
    assert cluster.plan().actions == ()
    assert cluster.pool["status"]["sizing"]["weightsBytes"] == 269_030_016


def test_a_pool_whose_inspection_has_a_name_that_is_taken_was_looked_at_again_and_again() -> None:
    cluster = ToyCluster(pool(UNKNOWN))
    cluster.taken = {("Job", "chat-inspect")}
    found = cluster.reconcile()
    assert found.actions == ()
    assert found.wake_after_s == 30
    assert cluster.said()["Accepted"] == "False NameTaken"
    assert "Job chat-inspect exists and is not this pool's" in cluster.condition("Accepted")["message"]
    cluster.taken = set()
    cluster.reconcile()
    assert cluster.said()["Accepted"] == "True Valid"
    assert ("Job", "chat-inspect") in cluster.children


def test_an_inspection_that_fails_names_all_three_ways() -> None:
    cluster, job = inspecting()
    cluster.pods["inspect-pod"] = ended(job, inspection.write_error("401: the repository is gated").decode())
    job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    cluster.reconcile()
    assert cluster.said()["Sized"] == "Unknown InspectionFailed"
    assert cluster.said()["Degraded"] == "True InspectionFailed"
    message = cluster.condition("Sized")["message"]
    for words in ("spec.model.shape", "catalogue", "401: the repository is gated", "delete the Job chat-inspect"):
        assert words in message
    assert cluster.plan().actions == ()


def test_a_try_that_failed_is_told_while_another_one_follows() -> None:
    cluster, job = inspecting()
    policy = job["spec"]["podFailurePolicy"]["rules"][0]
    assert inspection.EXIT_AGAIN not in policy["onExitCodes"]["values"], "else one bad moment would be the last word"
    cluster.pods["inspect-pod"] = ended(job, inspection.write_error("huggingface.co answers HTTP 503").decode())
    cluster.reconcile()
    assert cluster.said()["Sized"] == "Unknown Inspecting"
    assert "another one follows: huggingface.co answers HTTP 503" in cluster.condition("Sized")["message"]
    assert cluster.said()["Degraded"] == "False Healthy"


def test_a_paused_pool_does_not_promise_an_inspection() -> None:
    cluster = ToyCluster(pool({**UNKNOWN, "paused": True}))
    assert cluster.reconcile().actions == ()
    assert cluster.said()["Progressing"] == "True Paused"
    assert "no Job" in cluster.condition("Progressing")["message"]


def test_an_inspection_that_ended_without_a_word_says_how() -> None:
    cluster, job = inspecting()
    cluster.pods["inspect-pod"] = ended(job, "")
    state = cluster.pods["inspect-pod"]["status"]["containerStatuses"][0]["state"]["terminated"]
    state |= {"reason": "OOMKilled", "exitCode": 137}
    cluster.pods["inspect-pod"]["status"]["phase"] = "Failed"
    job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    cluster.reconcile()
    assert "OOMKilled, exit code 137" in cluster.condition("Sized")["message"]
    assert cluster.said()["Degraded"] == "True InspectionFailed"  # no limit of the spec is about it


def test_an_inspection_whose_pod_may_not_be_made() -> None:
    cluster, job = inspecting()
    cluster.warn(job, 'Error creating: pods "chat-inspect-x" is forbidden: exceeded quota: team')
    cluster.reconcile()
    assert "exceeded quota: team" in cluster.condition("Sized")["message"]
    assert cluster.plan().wake_after_s == LOOK_S, "no watch tells of Events"
    job["status"] = {"active": 1}
    cluster.reconcile()
    assert "quota" not in cluster.condition("Sized")["message"]


def test_an_image_without_the_inspection_is_quoted() -> None:
    cluster, job = inspecting()
    cluster.pods["inspect-pod"] = ended(job, 'exec: "prefixpool-worker": executable file not found in $PATH')
    job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    cluster.reconcile()
    assert '"prefixpool-worker": executable file not found' in cluster.condition("Sized")["message"]


def test_an_inspection_of_another_revision_is_thrown_away() -> None:
    cluster, _ = inspecting()
    cluster.edit_spec("kubectl", model={**UNKNOWN["model"], "revision": "v2"})
    assert [type(one) for one in cluster.reconcile().actions] == [Delete]
    found = [one for one in cluster.reconcile().actions if isinstance(one, Apply)]
    assert found[0].object["metadata"]["annotations"]["prefixpool.dev/inspects"] == "someone/unheard-of@v2"


def test_figures_by_hand_need_no_inspection() -> None:
    cluster, _ = inspecting()
    figures = {
        "weights": "257Mi", "maxModelLen": 8192, "hiddenSize": 576, "intermediateSize": 1536, "attentionHeads": 9,
        "vocabularySize": 49152, "kv": [{"kind": "full", "layers": 30, "heads": 3, "valuesPerToken": 128}],
    }  # fmt: skip
    cluster.edit_spec("kubectl", model={**UNKNOWN["model"], "shape": figures})
    cluster.run()
    assert cluster.pool["status"]["shapeSource"] == "Spec"
    assert ("Job", "chat-inspect") not in cluster.children


def test_an_inspection_runs_with_the_models_volume_and_token_and_no_device() -> None:
    model = {"source": "/models/x", "volume": {"claimName": "weights"}}
    cluster = ToyCluster(pool({"model": model, "accelerator": {}, "replicas": 1}))
    cluster.reconcile()
    pod = cluster.children["Job", "chat-inspect"]["spec"]["template"]["spec"]
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}} in pod["volumes"]
    assert GPU not in pod["containers"][0]["resources"]["limits"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in pod["containers"][0]["env"], "images on CUDA ask for all"
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"]


def test_a_broken_memory_is_forgotten() -> None:
    cluster = ToyCluster(pool({"replicas": 1}))
    cluster.run()
    cluster.edit("ConfigMap", "chat-config", lambda obj: obj["data"].update(planned="{", inspected="7"))
    cluster.run()
    assert cluster.said()["Sized"] == "True Planned"
    assert msgspec.json.decode(cluster.children["ConfigMap", "chat-config"]["data"]["planned"])["specHash"]


def vllm_on_cpu(**spec: Any) -> ToyCluster:
    accelerator = {"resource": "cpu", "memory": "16Gi"}
    shape = {"model": {"source": "HuggingFaceTB/SmolLM2-135M-Instruct"}, "engine": {"kind": "vllm"}}
    cluster = ToyCluster(pool({**shape, "accelerator": accelerator, "replicas": 1, **spec}))
    cluster.run()
    return cluster


def said(cluster: ToyCluster) -> str:
    return str(cluster.condition("Sized")["message"])


def test_tiers_too_small_to_be_of_use_are_warned_of_and_pods_start_all_the_same() -> None:
    cluster = vllm_on_cpu(kvCache={"host": {"memory": "256Mi"}})
    assert "Warning: The host pool of 256 MiB is smaller than 2 of the longest prompts" in said(cluster)
    assert len(cluster.pods) == 1
    assert "Warning" not in said(vllm_on_cpu())


def test_limit_below_the_plan_is_warned_of_before_and_after_pods_start() -> None:
    cluster = vllm_on_cpu(engine={"kind": "vllm", "resources": {"limits": {"memory": "2Gi"}}})
    assert "Warning: The engine's container may use 2.0 GiB of memory, and 16.0 GiB are planned" in said(cluster)
    cluster.infos = {"chat-0": info("chat-0", memory=Memory(limit_bytes=2 << 30))}
    cluster.run()
    assert said(cluster).count("Warning") == 1


def test_what_containers_really_get_and_use_is_compared_with_the_plan() -> None:
    cluster = vllm_on_cpu()
    for memory, words in (
        (Memory(limit_bytes=16 << 30, used_bytes=1, most_used_bytes=15 << 30, shared_limit_bytes=1 << 30), ""),
        (Memory(), ""),
        (Memory(limit_bytes=12 << 30), "chat-0 may use 12.0 GiB of memory, and 16.0 GiB are planned"),
        (Memory(shared_limit_bytes=64 << 20), "chat-0 has 64 MiB of /dev/shm, and 1.0 GiB are planned"),
        (Memory(limit_bytes=16 << 30, most_used_bytes=16 << 30), "chat-0 has used more than 95 % of its memory limit"),
    ):
        cluster.infos = {"chat-0": info("chat-0", memory=memory)}
        cluster.run()
        assert ("Warning" in said(cluster)) is bool(words)
        assert words in said(cluster)
        assert cluster.plan().actions == (), "nothing is done about it"


@pytest.mark.parametrize("blocks", [1, 2, -3])
def test_an_engine_that_reports_next_to_no_blocks_breaks_no_plan(blocks: int) -> None:
    """A division by what a replica holds ended every look at the pool."""
    shape = {
        "weights": "257Mi", "maxModelLen": 8, "hiddenSize": 576, "intermediateSize": 1536, "attentionHeads": 9,
        "vocabularySize": 49152,
        "kv": [
            {"kind": "full", "layers": 2, "heads": 3, "valuesPerToken": 128},
            {"kind": "window", "layers": 28, "heads": 3, "valuesPerToken": 128, "window": 64},
        ],
    }  # fmt: skip
    cluster = ToyCluster(pool({"kvBudget": {"residentTokens": 100}, "model": {"source": "a/b", "shape": shape}}))
    cluster.run()
    cluster.infos["chat-0"] = info("chat-0", device_blocks=blocks)
    cluster.reconcile()
    assert cluster.said()["Sized"] in ("True Measured", "True Planned")
