"""What the other tests of this folder stand on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.cluster.errors import ClusterError
from prefixpool_testing.eventually import eventually


def test_objects_outlive_a_restart_and_each_write_is_in_the_audit_log(api: ApiServer, namespace: str) -> None:
    since = api.audit_log.stat().st_size
    api.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kept", "namespace": namespace}})
    written = [each for each in api.asked(since) if each.writes and each.user.username == "admin"]
    assert [(each.verb, each.object_ref.name) for each in written] == [("patch", "kept")]
    api.restart()
    assert api.get("configmap", "kept", "-n", namespace)["metadata"]["name"] == "kept"


async def test_controllers_that_gave_up_while_the_api_was_away_are_back_with_it(api: ApiServer, namespace: str) -> None:
    api.programs.signal("kube-controller-manager", signal.SIGKILL)
    api.restart()
    api.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "owner", "namespace": namespace}})
    owner = api.get("serviceaccount", "owner", "-n", namespace)["metadata"]
    reference = {"apiVersion": "v1", "kind": "ServiceAccount", "name": "owner", "uid": owner["uid"]}
    metadata = {"name": "owned", "namespace": namespace, "ownerReferences": [reference]}
    api.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    api.kubectl("delete", "serviceaccount", "owner", "-n", namespace)

    async def collected() -> bool:
        return not api.kubectl("get", "configmap", "owned", "-n", namespace, "--ignore-not-found")

    await eventually(collected, within_s=60, what="the garbage collector works")


def test_a_service_account_has_no_more_than_its_own_rights(api: ApiServer, namespace: str) -> None:
    api.kubectl("create", "serviceaccount", "nobody", "-n", namespace)
    config = api.kubeconfig_of("nobody", namespace)
    with pytest.raises(ClusterError, match=r"cannot list resource \"pods\""):
        api.kubectl("--kubeconfig", str(config), "get", "pods")


_STARTS_AND_WAITS = """
import signal
from prefixpool_testing.cluster.api_server import api_server
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell started in the background
with api_server() as api:
    print(api.folder, *api.programs.pids(), flush=True)
    signal.pause()
"""


async def test_nothing_runs_on_when_the_tests_are_killed_and_the_next_start_removes_their_folder() -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    argv = [sys.executable, "-c", _STARTS_AND_WAITS]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        folder, *pids = first.stdout.readline().split()
        first.send_signal(signal.SIGKILL)
    assert len(pids) == 3

    async def ended() -> bool:
        return not any(Path("/proc", pid, "exe").exists() for pid in pids)

    await eventually(ended, what="all programs ended")
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as second:
        assert second.stdout is not None
        second.stdout.readline()
        assert not Path(folder).exists()
        second.send_signal(signal.SIGINT)
