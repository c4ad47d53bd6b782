"""Settings of `prefixpool-sim`: the vLLM flags that it understands, by vLLM's names, and its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from prefixpool.errors import SettingsError
from prefixpool_agent.sim.disk import DiskConfig
from prefixpool_agent.sim.events import KvEventsConfig
from prefixpool_agent.sim.scheduler import SchedulerConfig
from prefixpool_agent.sim.timing import TimingModel

ENV_PREFIX = "PREFIXPOOL_SIM"
_TIMING = TimingModel()


def _about(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class SimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Flags, environment and reference documentation (see prefixpool.settings)."""

    model: Annotated[str, _about("path or name of the model that the sim claims to serve; no file is read")]
    served_model_name: Annotated[tuple[str, ...], _about("names under which the model is served; default: --model")] = ()
    adapters: Annotated[tuple[str, ...], _about("names of adapters, each served as a model with a cache of its own")] = ()
    host: Annotated[str, _about("address to listen on")] = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(description="port to listen on; 0 picks one", ge=0, le=65535)] = 8000
    middleware: Annotated[tuple[str, ...], _about("ASGI middleware classes, module.Class, the first is outermost")] = ()
    block_size: Annotated[int, msgspec.Meta(description="tokens of a KV block", ge=1)] = 32
    num_gpu_blocks_override: Annotated[int, msgspec.Meta(description="KV blocks, the null block included", ge=2)] = 1821
    max_model_len: Annotated[int, msgspec.Meta(description="longest prompt and reply together, tokens", ge=2)] = 8192
    max_num_seqs: Annotated[int, msgspec.Meta(description="sequences that run at once", ge=1)] = 256
    max_num_batched_tokens: Annotated[int, msgspec.Meta(description="tokens computed in one step", ge=1)] = 2048
    host_blocks: Annotated[int, msgspec.Meta(description="blocks of the host tier; 0 = none", ge=0)] = 0
    disk_dir: Annotated[str, _about("folder of the disk tier, below the host tier; empty: none")] = ""
    disk_blocks: Annotated[int, msgspec.Meta(description="blocks of the disk tier; 0 = none", ge=0)] = 0
    disk_shared: Annotated[bool, _about("other sims use the folder, too")] = False
    disk_free_bytes: Annotated[int, msgspec.Meta(description="bytes of the disk that are left free", ge=0)] = 1 << 30
    kv_events_config: Annotated[str, _about("JSON as vLLM's flag of this name; empty: no events")] = ""
    ignore_tools: Annotated[bool, _about("the chat template ignores tools and tool calls")] = False
    time_scale: Annotated[
        float, msgspec.Meta(description="simulated seconds last this many real ones; 0 = no waiting", ge=0)
    ] = 1.0
    decode_step_s: Annotated[float, _about("seconds of a step, whatever it computes")] = _TIMING.step_s
    decode_step_s_per_sequence: Annotated[float, _about("plus for each decoding sequence")] = _TIMING.sequence_s
    decode_step_s_per_token: Annotated[float, _about("plus for each token of the decoding contexts")] = _TIMING.context_s
    prefill_s_per_token: Annotated[float, _about("plus p1 * m for m prompt tokens computed")] = _TIMING.prefill_s
    prefill_s_per_token2: Annotated[float, _about("plus p2 * m * (m + 2 * c) for m tokens behind c computed ones")] = (
        _TIMING.prefill_s2
    )
    request_s: Annotated[float, _about("plus for each request that begins")] = _TIMING.request_s
    restore_s_per_token: Annotated[float, _about("plus for each token restored from below the device")] = _TIMING.restore_s
    read_s_per_token: Annotated[float, _about("plus for each of them that is read from disk")] = _TIMING.read_s

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.model,)

    def timing(self) -> TimingModel:
        return TimingModel(
            step_s=self.decode_step_s,
            sequence_s=self.decode_step_s_per_sequence,
            context_s=self.decode_step_s_per_token,
            prefill_s=self.prefill_s_per_token,
            prefill_s2=self.prefill_s_per_token2,
            request_s=self.request_s,
            restore_s=self.restore_s_per_token,
            read_s=self.read_s_per_token,
        )

    def scheduler(self) -> SchedulerConfig:
        """Raises SettingsError if one request of the longest length does not fit, as vLLM refuses to start."""
        usable = (self.num_gpu_blocks_override - 1) * self.block_size
        if usable < self.max_model_len:
            raise SettingsError(
                f"--max-model-len={self.max_model_len} does not fit: {self.num_gpu_blocks_override} blocks of "
                f"{self.block_size} tokens, less the null block, hold {usable} tokens"
            )
        return SchedulerConfig(
            blocks=self.num_gpu_blocks_override,
            block_tokens=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            host_blocks=self.host_blocks,
        )

    def disk(self) -> DiskConfig | None:
        """Raises SettingsError for a disk tier without a folder, without room, or without a host tier above it."""
        if not self.disk_dir and not self.disk_blocks:
            return None
        if not (self.disk_dir and self.disk_blocks and self.host_blocks):
            raise SettingsError("a disk tier needs --disk-dir, --disk-blocks and --host-blocks")
        return DiskConfig(Path(self.disk_dir), self.disk_blocks, self.disk_free_bytes, self.disk_shared)

    def events(self) -> KvEventsConfig:
        """Raises SettingsError if the JSON is not what vLLM accepts."""
        if not self.kv_events_config:
            return KvEventsConfig()
        try:
            return msgspec.json.decode(self.kv_events_config, type=KvEventsConfig)
        except msgspec.DecodeError as error:
            raise SettingsError(f"--kv-events-config={self.kv_events_config!r}: {error}") from error
