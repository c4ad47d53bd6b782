"""What one local pool takes of its machine, so that no other pool takes it: ports of its programs, cores of its engines."""

from __future__ import annotations

from collections.abc import Sequence

from prefixpool.api.engine import EngineKind
from prefixpool_cli.claims import Claims
from prefixpool_cli.cores import Binding, bind
from prefixpool_cli.errors import PoolError
from prefixpool_cli.pool_spec import PoolSpec, Ports
from prefixpool_cli.ports import claim_port, claim_ports, port_claim


class PoolShare:
    """Held until `close`, or until this process ends."""

    def __init__(self, spec: PoolSpec) -> None:
        self._spec = spec
        self._claims = Claims()
        self._bindings: dict[str, Binding] = {}  # by replica
        self._ports: dict[str, Ports] = {}

    def router_ports(self) -> list[tuple[int, int]]:
        """Of each router, for clients and of its admin side. Raises PoolError."""
        spec = self._spec
        for option, port in (("--port", spec.port), ("--admin-port", spec.admin_port)):
            if port and not claim_port(self._claims, port):
                raise PoolError(
                    f"another pool has claimed port {port}", f"choose another with {option}, or 0 for any free one"
                )
        clients = claim_ports(self._claims, spec.routers, spec.host)
        admins = claim_ports(self._claims, spec.routers)
        clients[0], admins[0] = spec.port or clients[0], spec.admin_port or admins[0]
        return list(zip(clients, admins, strict=True))

    def bind_cores(self, replicas: Sequence[str], available: Sequence[int]) -> list[str]:
        """For new engines that vLLM runs; those of them that share a core with another, of this pool or not."""
        if self._spec.engine is not EngineKind.VLLM:
            return []
        bindings = bind(self._claims, len(replicas), available, self._spec.replicas)
        self._bindings |= dict(zip(replicas, bindings, strict=True))
        return [name for name in replicas if self._bindings[name].shared]

    def cores(self, replica: str) -> str:
        """As `--cpu-cores` takes them; empty: any."""
        return self._bindings[replica].words if replica in self._bindings else ""

    def ports(self, replica: str) -> Ports:
        """Of a new replica. Raises PoolError."""
        self._ports[replica] = Ports(*claim_ports(self._claims, len(Ports._fields)))
        return self._ports[replica]

    def release(self, replica: str) -> None:
        """What one replica had: it has ended for good."""
        if (binding := self._bindings.pop(replica, None)) is not None:
            self._claims.release(*binding.claims)
        self._claims.release(*map(port_claim, self._ports.pop(replica, ())))

    def close(self) -> None:
        """Give everything back. May be called twice."""
        self._bindings.clear()
        self._ports.clear()
        self._claims.close()
