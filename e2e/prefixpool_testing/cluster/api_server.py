"""etcd, kube-apiserver and kube-controller-manager: the API as in production, without a node, on loopback.

with api_server() as api:
    api.kubectl("apply", "-f", "crds/")
"""

from __future__ import annotations

import json
import ssl
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from prefixpool_cli.ports import claimed_ports
from prefixpool_testing.cluster import audit, debian, folders
from prefixpool_testing.cluster.kubectl import Kubectl
from prefixpool_testing.cluster.network import first_address
from prefixpool_testing.cluster.pki import Pki
from prefixpool_testing.cluster.programs import Programs
from prefixpool_testing.cluster.toolchain import tool

NODE: Final = "node1"
USERS: Final = {  # name, which is its token, too: only this machine reaches the cluster
    "admin": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
    "system:kube-proxy": "",
    f"system:node:{NODE}": "system:nodes",
}
_LOOPBACK: Final = "127.0.0.1"
_UNREACHED: Final = "198.18.0.0/20"  # without a node Services are only objects
_READY_S: Final = 60.0
_CONTROLLERS: Final = "kube-controller-manager"


class Place(NamedTuple):
    """Where it listens, etcd always on loopback; `services`: the addresses of Services, as address/bits."""

    host: str
    services: str
    api: int
    etcd: int
    etcd_peer: int


class ApiServer(Kubectl):
    """`kubeconfig` is the admin's, `url` where it listens, `audit_log` what was asked of it. Use `api_server()`."""

    def __init__(self, folder: Path, place: Place, programs: Programs) -> None:
        super().__init__(folder / "admin.kubeconfig")
        self.folder = folder
        self.programs = programs
        self.url = f"https://{place.host}:{place.api}"
        self.audit_log = folder / "audit.log"
        self._place = place
        self._controller_manager: list[str | Path] = []  # its command, once it was started

    def kubeconfig_of(self, service_account: str, namespace: str) -> Path:
        """The rights of an existing ServiceAccount and no more, for two hours."""
        token = self.kubectl("create", "token", service_account, "-n", namespace, "--duration=2h").strip()
        return self.write_kubeconfig(f"{namespace}.{service_account}", token, namespace)

    def asked(self, since_bytes: int = 0) -> list[audit.Request]:
        """Requests in the audit log, from that many bytes on (`audit_log.stat().st_size` is now)."""
        return list(audit.requests(self.audit_log, since_bytes))

    def start(self) -> None:
        """The API server alone. Returns when it is ready."""
        self.programs.start("kube-apiserver", [tool("kube-apiserver"), *as_flags(self._flags())])
        self.programs.until("kube-apiserver", self._ready, _READY_S)
        if self._controller_manager and self.programs.exit_status(_CONTROLLERS) is not None:
            # It gives up when the API is away while it starts. A kubelet would start it again.
            self.programs.start(_CONTROLLERS, self._controller_manager)

    def stop(self) -> None:
        """The API server alone, in order: etcd keeps the data, and `start` brings it back at the same address."""
        self.programs.stop("kube-apiserver")

    def kill(self) -> None:
        """SIGKILL, as `stop` otherwise."""
        self.programs.kill("kube-apiserver")

    def restart(self) -> None:
        """In order; ready again."""
        self.stop()
        self.start()

    def bring_up(self, controller_manager_flags: Mapping[str, object]) -> None:
        """Everything, from nothing."""
        self._make_keys()
        self._start_etcd()
        self.start()
        self._start_controller_manager(controller_manager_flags)

    def kubeconfig_of_user(self, user: str) -> Path:
        """One of `USERS`."""
        return self.write_kubeconfig(user, user)

    def write_kubeconfig(self, name: str, token: str, namespace: str = "default") -> Path:
        """For holders of a token; the certificate is inside, so the file alone is enough."""
        path = self.folder / f"{name}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps(_kubeconfig(self.url, self.folder / "pki/ca.crt", token, namespace)))
        return path

    def _make_keys(self) -> None:
        pki = Pki(self.folder / "pki")
        hosts = [f"DNS:{name}" for name in ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")]
        addresses = [f"IP:{address}" for address in (_LOOPBACK, self._place.host, first_address(self._place.services))]
        pki.sign("apiserver", "/CN=kube-apiserver", hosts + addresses)
        pki.sign("kubelet-client", "/O=system:masters/CN=kubelet-client")
        pki.key_pair("sa")
        rows = [f'{user},{user},{user},"{group}"\n' for user, group in USERS.items()]
        (self.folder / "tokens.csv").write_text("".join(rows))
        (self.folder / "audit.yaml").write_text(audit.POLICY)
        self.audit_log.touch()
        self.kubeconfig_of_user("admin")

    def _start_etcd(self) -> None:
        client, peer = (f"http://{_LOOPBACK}:{port}" for port in (self._place.etcd, self._place.etcd_peer))
        flags = {
            "data-dir": self.folder / "etcd",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "unsafe-no-fsync": "true",
        }
        self.programs.start("etcd", [debian.unpacked("etcd-server") / "usr/bin/etcd", *as_flags(flags)])

    def _flags(self) -> dict[str, object]:
        pki = self.folder / "pki"
        return {
            "etcd-servers": f"http://{_LOOPBACK}:{self._place.etcd}",
            "bind-address": self._place.host,
            "secure-port": self._place.api,
            # On loopback nobody could reach it by the Service `kubernetes`.
            "endpoint-reconciler-type": "none" if self._place.host == _LOOPBACK else "lease",
            "tls-cert-file": pki / "apiserver.crt",
            "tls-private-key-file": pki / "apiserver.key",
            "client-ca-file": pki / "ca.crt",
            "token-auth-file": self.folder / "tokens.csv",
            "service-account-key-file": pki / "sa.pub",
            "service-account-signing-key-file": pki / "sa.key",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-cluster-ip-range": self._place.services,
            "authorization-mode": "Node,RBAC",
            "audit-policy-file": self.folder / "audit.yaml",
            "audit-log-path": self.audit_log,
            "kubelet-client-certificate": pki / "kubelet-client.crt",
            "kubelet-client-key": pki / "kubelet-client.key",
            "kubelet-preferred-address-types": "InternalIP",
        }

    def _start_controller_manager(self, more: Mapping[str, object]) -> None:
        flags = {
            "kubeconfig": self.kubeconfig_of_user("system:kube-controller-manager"),
            "service-account-private-key-file": self.folder / "pki/sa.key",
            "root-ca-file": self.folder / "pki/ca.crt",
            "use-service-account-credentials": "true",
            "leader-elect": "false",
            "secure-port": 0,
        }
        self._controller_manager = [tool(_CONTROLLERS), *as_flags({**flags, **more})]
        self.programs.start(_CONTROLLERS, self._controller_manager)

    def _ready(self) -> bool:
        trust = ssl.create_default_context(cafile=self.folder / "pki/ca.crt")
        asked = urllib.request.Request(f"{self.url}/readyz", headers={"Authorization": "Bearer admin"})
        try:
            with urllib.request.urlopen(asked, context=trust, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def api_server() -> Iterator[ApiServer]:
    """On free loopback ports, ready. No root is needed."""
    debian.installed("openssl", "setpriv")
    with folders.temporary("prefixpool-api") as folder, claimed_ports(3) as ports:
        programs = Programs(folder / "logs")
        try:
            api = ApiServer(folder, Place(_LOOPBACK, _UNREACHED, *ports), programs)
            api.bring_up({})
            yield api
        finally:
            programs.stop_all()


def as_flags(flags: Mapping[str, object]) -> list[str]:
    """As all programs of Kubernetes take them."""
    return [f"--{name}={value}" for name, value in flags.items()]


def _kubeconfig(url: str, authority: Path, token: str, namespace: str) -> Any:
    cluster = {"server": url, "certificate-authority-data": b64encode(authority.read_bytes()).decode()}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
        "current-context": "test",
    }
