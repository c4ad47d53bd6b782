"""vLLM's argument list and environment."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefixpool.api.engine import EngineKind
from prefixpool.api.kv_cache import Eviction
from prefixpool.errors import SettingsError
from prefixpool_agent.engines.base import EngineSpec, Host, core_list
from prefixpool_agent.engines.sim import sim_spec
from prefixpool_agent.engines.vllm import vllm_spec
from prefixpool_agent.settings import Device, WorkerSettings

HOST = Host(python="/py", cores=(0, 1), weight_bytes=1_000_000_000)


def settings(**changes: Any) -> WorkerSettings:
    given = {"replica": "p-0", "run_dir": "/run/p", "model": "/models/smol", "engine_key_file": "/key", "device": Device.CPU}
    return WorkerSettings(**{**given, **changes})


def option(spec: EngineSpec, flag: str) -> str:
    at = spec.argv.index(flag)
    assert spec.argv.count(flag) == 1
    return spec.argv[at + 1]


def test_what_the_pool_relies_on_is_set() -> None:
    spec = vllm_spec(settings(), HOST)
    assert spec.argv[:3] == ("/py", "-m", "vllm.entrypoints.openai.api_server")
    assert option(spec, "--served-model-name") == spec.served_model_name == "smol"
    assert option(spec, "--middleware") == "prefixpool_agent.gate.Gate"
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-request-id-headers"} <= set(spec.argv)
    assert spec.url == "http://127.0.0.1:8100"
    assert spec.env["VLLM_API_KEY"] == ""
    assert spec.env["VLLM_SERVER_DEV_MODE"] == "0"


def test_kv_events_never_leave_the_run_directory() -> None:
    events = json.loads(option(vllm_spec(settings(), HOST), "--kv-events-config"))
    assert events["endpoint"] == "ipc:///run/p/kv.pub"
    assert events["replay_endpoint"] == "ipc:///run/p/kv.replay"
    assert events["enable_kv_cache_events"] is True


def test_cpu_uses_all_its_cores_and_a_bounded_cache() -> None:
    spec = vllm_spec(settings(), HOST)
    assert spec.env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert option(spec, "--kv-cache-memory-bytes") == str(1 << 30)
    assert option(spec, "--block-size") == "32"
    assert vllm_spec(settings(cpu_cores="1"), HOST).env["VLLM_CPU_OMP_THREADS_BIND"] == "1"


@pytest.mark.parametrize(
    ("cores", "words"),
    [
        ("7", "may use cores 0-1, not 7"),
        ("0-3", "may use cores 0-1, not 2, 3"),
        ("0-999999", "not 2, 3, 4, 5, 6, …"),
        ("1-0", "found '1-0'"),
        ("0,", "found ''"),
        ("all", "expected cores as"),
        ("-1", "expected cores as"),
        ("0-1-2", "expected cores as"),
        ("0|9", "not 9"),
    ],
)
def test_cores_that_are_not_there_ended_the_engine_a_minute_later(cores: str, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        vllm_spec(settings(cpu_cores=cores), HOST)
    assert "cpu_cores" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("cores", ["1", "0-1", "0, 1", "auto", "nobind"])
def test_cores_pass_as_vllm_takes_them(cores: str) -> None:
    assert vllm_spec(settings(cpu_cores=cores), HOST).env["VLLM_CPU_OMP_THREADS_BIND"] == cores


def test_each_device_of_an_engine_needs_cores_of_its_own() -> None:
    assert vllm_spec(settings(cpu_cores="0|1", tensor_parallel=2), HOST).env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    with pytest.raises(SettingsError, match="2 lists of cores"):
        vllm_spec(settings(cpu_cores="0-1", tensor_parallel=2), HOST)


def test_cuda_leaves_memory_and_threads_to_the_engine() -> None:
    spec = vllm_spec(settings(device=Device.CUDA, memory_utilization_percent=85), HOST)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in spec.env
    assert "--kv-cache-memory-bytes" not in spec.argv
    assert option(spec, "--gpu-memory-utilization") == "0.85"


def test_blocks_of_16_tokens_that_nobody_had_asked_for_ruled_out_kernels_on_cuda() -> None:
    """With a size that is given, vLLM takes kernels that can have it and no others: for sparse MLA on H200 none at all, so
    that it does not start, and for MLA on B200 only the slowest.
    """
    spec = vllm_spec(settings(device=Device.CUDA), HOST)
    assert "--block-size" not in spec.argv
    assert spec.block_tokens == 0
    assert option(vllm_spec(settings(device=Device.CUDA, block_tokens=64), HOST), "--block-size") == "64"


def test_block_size_that_vllm_refuses_on_cpu_is_refused_before_the_start() -> None:
    with pytest.raises(SettingsError, match="multiple of 32"):
        vllm_spec(settings(block_tokens=16), HOST)


def test_sockets_that_vllm_leaves_behind_are_in_the_run_directory_not_in_tmp() -> None:
    assert vllm_spec(settings(), HOST).env["VLLM_RPC_BASE_PATH"] == "/run/p"


def test_deadline_grows_with_the_weights() -> None:
    small = vllm_spec(settings(), HOST).startup_timeout_s
    large = vllm_spec(settings(), HOST._replace(weight_bytes=10_000_000_000)).startup_timeout_s
    unknown = vllm_spec(settings(), HOST._replace(weight_bytes=None)).startup_timeout_s
    assert small == 600 + 20
    assert large == 600 + 200
    assert unknown > large
    assert vllm_spec(settings(startup_timeout_s=7), HOST).startup_timeout_s == 7


def test_a_folder_needs_no_hub_unless_something_else_does() -> None:
    assert vllm_spec(settings(), HOST).env["HF_HUB_OFFLINE"] == "1"
    assert vllm_spec(settings(engine_args="--trust-remote-code"), HOST).env["HF_HUB_OFFLINE"] == "1"
    adapters = settings(engine_args="--enable-lora --lora-modules a=org/adapter")
    assert "HF_HUB_OFFLINE" not in vllm_spec(adapters, HOST).env


def test_a_model_on_the_hub_is_brought_before_the_engine_starts() -> None:
    nowhere = HOST._replace(weight_bytes=None)
    spec = vllm_spec(settings(model="org/name", revision="v1"), nowhere)
    at = spec.argv.index("--")
    assert spec.argv[:3] == ("/py", "-m", "prefixpool_agent.download")
    assert spec.argv[3:at] == ("--model", "org/name", "--revision", "v1", "--run-dir", "/run/p", "--then-offline")
    assert spec.argv[at + 1 : at + 4] == ("/py", "-m", "vllm.entrypoints.openai.api_server")
    assert "--revision" not in spec.argv[at:]
    assert "HF_HUB_OFFLINE" not in spec.env
    assert "main" in vllm_spec(settings(model="org/name"), nowhere).argv


@pytest.mark.parametrize(
    "more",
    ["--lora-modules a=org/b", "--speculative_config.model=org/b", "--tokenizer=org/b", "--trust-remote-code"],
)
def test_an_engine_that_needs_more_from_the_hub_is_not_cut_off_from_it(more: str) -> None:
    spec = vllm_spec(settings(model="org/name", engine_args=more), HOST._replace(weight_bytes=None))
    assert "--then-offline" not in spec.argv


@pytest.mark.parametrize("model", ["s3://bucket/name", "org/name:Q4_K_M", "name"])
def test_what_only_the_engine_can_resolve_is_left_to_it(model: str) -> None:
    spec = vllm_spec(settings(model=model, revision="v1"), HOST._replace(weight_bytes=None))
    assert spec.argv[2] == "vllm.entrypoints.openai.api_server"
    assert option(spec, "--revision") == "v1"


def test_listening_everywhere_is_reached_on_loopback() -> None:
    assert vllm_spec(settings(host="0.0.0.0"), HOST).url == "http://127.0.0.1:8100"
    assert vllm_spec(settings(host="::1"), HOST).url == "http://[::1]:8100"
    assert vllm_spec(settings(host="::1"), HOST).url == "http://[::1]:8100"


def test_harmless_extra_arguments_are_passed_on() -> None:
    spec = vllm_spec(settings(engine_args="--seed -1 --max-num-batched-tokens 512 --hf-overrides '{\"a\": 1}' -q awq"), HOST)
    assert spec.argv[-8:] == ("--seed", "-1", "--max-num-batched-tokens", "512", "--hf-overrides", '{"a": 1}', "-q", "awq")


@pytest.mark.parametrize(
    "argument",
    [
        "--port 1",
        "--port=1",
        "--host=0.0.0.0",
        "--api-key x",
        "--api_key=x",
        "--middleware a.B",
        "--kv-events-config '{}'",
        "--kv_events_config={}",
        "--kv-events-config.endpoint=tcp://*:1",
        "--kv-events-config.topic x",
        "--served-model-name+ x",
        "--served_model_name x",
        "--no-enable-prefix-caching",
        "--no_enable_prefix_caching",
        "--no-enable-prompt-tokens-details",
        "--config f.yaml",
        "--shutdown-timeout 30",
        "--root-path /x",
        "--uds /s",
        "--ssl-keyfile k",
        "--enable-log-requests",
        "--api-server-count 4",
        "--data-parallel-size 2",
        "--data_parallel_size=2",
        "-dp 2",
        "-dp=2",
        "-dpl 1",
        "-tp 2",
        "-n2",
        "--nnodes 2",
        "--kv-ev x",
        "--middle a.B",
        "--mo x",
        "--seed 1 -- --port 2",
    ],
)
def test_arguments_that_undo_ours_are_refused(argument: str) -> None:
    with pytest.raises(SettingsError, match=r"is refused: .{10,}"):
        vllm_spec(settings(engine_args=argument), HOST)


def test_refusal_says_why_and_what_instead() -> None:
    with pytest.raises(SettingsError, match=r"--port is refused: the worker sets it, from its setting engine_port"):
        vllm_spec(settings(engine_args="--port=1"), HOST)
    with pytest.raises(SettingsError, match="run more replicas"):
        vllm_spec(settings(engine_args="-dp 2"), HOST)


def test_unbalanced_quotes_are_a_clear_error() -> None:
    with pytest.raises(SettingsError, match="No closing quotation"):
        vllm_spec(settings(engine_args="--a 'b"), HOST)


def test_sim_takes_its_own_arguments_and_refuses_ours() -> None:
    spec = sim_spec(settings(engine=EngineKind.SIM, device_blocks=100, engine_args="--time-scale 0.1"), HOST)
    assert spec.argv[:3] == ("/py", "-m", "prefixpool_agent.sim.main")
    assert option(spec, "--num-gpu-blocks-override") == "100"
    assert spec.argv[-2:] == ("--time-scale", "0.1")
    with pytest.raises(SettingsError, match="refused"):
        sim_spec(settings(engine_args="--middleware x.Y"), HOST)


@pytest.mark.parametrize(
    ("cores", "text"), [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((5, 1, 2, 0), "0-2,5"), ((0, 2), "0,2")]
)
def test_core_lists(cores: tuple[int, ...], text: str) -> None:
    assert core_list(cores) == text


# -- tiers below the device


def tiers(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(option(vllm_spec(settings(**changes), HOST), "--kv-transfer-config"))
    assert (config["kv_connector"], config["kv_role"]) == ("OffloadingConnector", "kv_both")
    return dict(config["kv_connector_extra_config"])


def test_device_alone_needs_no_connector() -> None:
    assert "--kv-transfer-config" not in vllm_spec(settings(), HOST).argv


@pytest.mark.parametrize("device", Device)
def test_host_memory_is_a_tier(device: Device) -> None:
    """On CUDA the copies are vLLM's own. This has not been run on a GPU."""
    found = tiers(device=device, host_kv_bytes=1 << 30)
    assert found["cpu_bytes_to_use"] == 1 << 30
    assert (found["self_describing_kv_events"], found["offload_prompt_only"]) == (True, False)
    assert "secondary_tiers" not in found
    ours = "prefixpool_agent.tiers.specs"
    expected = ("HostSpec" if device is Device.CPU else "CudaHostSpec", ours)
    assert (found["spec_name"], found.get("spec_module_path")) == expected


@pytest.mark.parametrize(("device", "spec"), [(Device.CPU, "HostDiskSpec"), (Device.CUDA, "CudaHostDiskSpec")])
def test_disk_is_a_tier_below_host_memory(device: Device, spec: str) -> None:
    disk = {"disk_kv_dir": "/kv", "disk_kv_bytes": 1 << 40, "disk_kv_shared": True, "disk_kv_deadline_s": 0.5}
    found = tiers(device=device, host_kv_bytes=1 << 30, **disk)
    assert found["spec_name"] == spec
    (tier,) = found["secondary_tiers"]
    assert (tier["type"], tier["module_path"]) == ("DiskTier", "prefixpool_agent.tiers.disk_tier")
    assert (tier["directory"], tier["capacity_bytes"], tier["shared"], tier["deadline_s"]) == ("/kv", 1 << 40, True, 0.5)


def test_what_changes_a_chunks_bytes_is_part_of_its_name() -> None:
    disk = {"host_kv_bytes": 1 << 30, "disk_kv_dir": "/kv", "disk_kv_bytes": 1 << 40}
    changes = [
        {},
        {"dtype": "float32"},
        {"kv_cache_dtype": "fp8"},
        {"engine_args": "--rope-scaling x"},
        {"device": Device.CUDA},
    ]
    setups = {tiers(**disk, **change)["secondary_tiers"][0]["setup"] for change in changes}
    assert len(setups) == len(changes)


def test_eviction_is_ours_or_the_engines() -> None:
    worth = tiers(host_kv_bytes=1, kv_eviction=Eviction.WORTH)
    assert (worth["eviction_policy"], worth["cache_policy_module_path"]) == (
        "WorthPolicy",
        "prefixpool_agent.tiers.worth_policy",
    )
    assert tiers(host_kv_bytes=1, kv_eviction=Eviction.ARC)["eviction_policy"] == "arc"


@pytest.mark.parametrize(
    "changes",
    [
        {"disk_kv_dir": "/kv", "disk_kv_bytes": 1},
        {"host_kv_bytes": 1, "disk_kv_dir": "/kv"},
        {"host_kv_bytes": 1, "disk_kv_bytes": 1},
    ],
)
def test_half_a_disk_tier_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="a disk tier needs"):
        vllm_spec(settings(**changes), HOST)


def test_host_memory_that_shared_memory_cannot_hold_is_refused() -> None:
    disk = settings(host_kv_bytes=2_000_000, disk_kv_dir="/kv", disk_kv_bytes=1 << 40)
    with pytest.raises(SettingsError, match="only 1000000 bytes are free in /dev/shm"):
        vllm_spec(disk, HOST._replace(shm_bytes=1_000_000))
    assert vllm_spec(settings(host_kv_bytes=2_000_000), HOST._replace(shm_bytes=1_000_000)), "private memory"
    assert vllm_spec(disk, HOST._replace(shm_bytes=2_000_000))


def test_sim_has_the_same_tiers() -> None:
    block_bytes = 32 * 23_040
    host = {"engine": EngineKind.SIM, "block_tokens": 32, "host_kv_bytes": 100 * block_bytes}
    assert option(sim_spec(settings(**host), HOST), "--host-blocks") == "100"
    disk = {"disk_kv_dir": "/kv", "disk_kv_bytes": 900 * block_bytes, "disk_kv_shared": True, "disk_kv_free_bytes": 7}
    spec = sim_spec(settings(**host, **disk), HOST)
    found = [option(spec, f"--disk-{name}") for name in ("dir", "blocks", "shared", "free-bytes")]
    assert found == ["/kv", "900", "true", "7"]
    assert not [
        word for word in sim_spec(settings(engine=EngineKind.SIM), HOST).argv if word.startswith(("--host-b", "--disk"))
    ]
    with pytest.raises(SettingsError, match="a disk tier needs host_kv_bytes"):
        sim_spec(settings(engine=EngineKind.SIM, disk_kv_dir="/kv", disk_kv_bytes=1), HOST)


def test_connector_of_the_users_is_refused() -> None:
    for argument in ("--kv-transfer-config={}", "--kv-offloading-size 4", "--kv-transfer-config.kv_role kv_both"):
        with pytest.raises(SettingsError, match="host_kv_bytes"):
            vllm_spec(settings(engine_args=argument), HOST)
