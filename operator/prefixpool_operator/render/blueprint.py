"""What children are rendered from, and figures that several of them share."""

from __future__ import annotations

from typing import Final

import msgspec

from prefixpool.api.engine import EngineKind
from prefixpool.api.router import RouterMode
from prefixpool.api.spec import PoolSpec
from prefixpool.sizing.plan import SizingPlan
from prefixpool_operator.identity import Component, Identity
from prefixpool_operator.observed import Settings

ENGINE_STOP_S: Final = 10  # the worker's setting stop_timeout_s
_KILL_S: Final = 5  # behind it, the engine's process group is killed
ROUTER_ACCEPT_S: Final = 5  # the router's setting drain_accept_s
_SPARE_S: Final = 15
_START_BASE_S: Final = 900  # profiling, compilation and graphs on top of loading
_LOAD_BYTES_S: Final = 100_000_000  # of weights, from a slow volume
_DOWNLOAD_BYTES_S: Final = 10_000_000  # by the engine itself, as from a bucket; what the worker downloads does not count
_SIM_START_S: Final = 120


class Blueprint(msgspec.Struct, frozen=True, kw_only=True):
    """All that rendering may depend on."""

    identity: Identity
    spec: PoolSpec
    sizing: SizingPlan
    settings: Settings

    @property
    def sidecars(self) -> bool:
        return self.spec.router.mode is RouterMode.SIDECAR

    @property
    def router_component(self) -> Component:
        """Pods that clients talk to."""
        return Component.WORKER if self.sidecars else Component.ROUTER

    @property
    def simulated(self) -> bool:
        return self.spec.engine.kind is EngineKind.SIM

    @property
    def worker_image(self) -> str:
        return self.spec.engine.image or self.settings.worker_image

    @property
    def drain_s(self) -> int:
        return self.spec.drain.timeout_seconds

    @property
    def worker_grace_s(self) -> int:
        """Engine and router drain one after the other at worst: the kubelet stops the sidecar last, in the same period."""
        engine = self.drain_s + ENGINE_STOP_S + _KILL_S
        return engine + self.router_grace_s if self.sidecars else engine + _SPARE_S

    @property
    def router_grace_s(self) -> int:
        return ROUTER_ACCEPT_S + self.drain_s + _SPARE_S

    @property
    def startup_s(self) -> int:
        """Until the engine must answer, from its start or the end of the worker's download."""
        if self.spec.engine.startup_timeout_seconds:
            return self.spec.engine.startup_timeout_seconds
        rate = _DOWNLOAD_BYTES_S if self.downloads else _LOAD_BYTES_S
        return _SIM_START_S if self.simulated else _START_BASE_S + self.sizing.weights_bytes // rate

    @property
    def downloads(self) -> bool:
        """Whether the model comes from the Hub, or from elsewhere."""
        return not self.simulated and not self.spec.model.source.startswith("/")

    @property
    def downloads_alone(self) -> bool:
        """Whether each pod keeps a copy for itself."""
        return self.downloads and self.spec.model.cache is None
