"""A whole Kubernetes of one node: control plane, containerd, kubelet, kube-proxy, DNS, enforced NetworkPolicies. Needs root.

    with node() as cluster:
        cluster.load(archive)
        cluster.api.kubectl("apply", "-f", "pool.yaml")

Pods and Services are reached from this machine by their addresses.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from prefixpool_testing.cluster import debian, folders, node_files
from prefixpool_testing.cluster.api_server import NODE, ApiServer, Place, as_flags
from prefixpool_testing.cluster.cgroups import cgroup
from prefixpool_testing.cluster.errors import ClusterError
from prefixpool_testing.cluster.namespaces import namespaces
from prefixpool_testing.cluster.network import Network, first_address, free_network, network_of
from prefixpool_testing.cluster.programs import Programs
from prefixpool_testing.cluster.toolchain import tool

API_PORT: Final = 6443
_READY_S: Final = 90.0
_IMPORT_S: Final = 300.0
_COMMANDS: Final = ("openssl", "setpriv", "ip", "iptables", "ipset", "conntrack")
_PACKAGES: Final = ("containerd", "runc", "containernetworking-plugins")


class Node:
    """A running cluster."""

    def __init__(self, folder: Path, enter: Sequence[str], network: Network) -> None:
        self.folder = folder
        self.network = network
        self.programs = Programs(folder / "logs", enter)
        place = Place(network.node_address, api=API_PORT, etcd=2379, etcd_peer=2380, services=network.services)
        self.api = ApiServer(folder, place, self.programs)
        self._enter = tuple(enter)

    def to_share(self) -> tuple[str, tuple[str, ...], int]:
        """For another process of this machine, until the node ends: what `of` takes."""
        return str(self.folder), self._enter, self.network.slot

    @classmethod
    def of(cls, shared: tuple[str, Sequence[str], int]) -> Self:
        """Another process's. It can do all but start programs, and stop those that run."""
        folder, enter, slot = shared
        return cls(Path(folder), enter, network_of(slot))

    # -- for tests

    def load(self, archive: Path) -> None:
        """An OCI archive; its images get their names from it."""
        self.ctr("images", "import", str(archive))

    def kill_container(self, pod: str, container: str, namespace: str) -> None:
        """SIGKILL to the first process of a container, as if it had died."""
        status = self.api.get("pod", pod, "-n", namespace)["status"]
        all_of_it = [*status.get("initContainerStatuses", ()), *status["containerStatuses"]]
        (found,) = (each["containerID"] for each in all_of_it if each["name"] == container)
        self.ctr("tasks", "kill", "--signal", "SIGKILL", found.removeprefix("containerd://"))

    def ctr(self, *arguments: str) -> str:
        """containerd's own client, in Kubernetes' namespace. Raises ClusterError with its words."""
        client = debian.unpacked("containerd") / "usr/bin/ctr"
        argv = [*self._enter, str(client), "--address", self._socket, "--namespace", "k8s.io", *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_IMPORT_S, check=False)
        if done.returncode:
            raise ClusterError(f"ctr {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def volume(self, name: str, contents: Mapping[str, Path]) -> Path:
        """A folder of the node's, for a hostPath; folders of this machine are seen in it, read-only, until the node ends."""
        folder = self.folder / "volumes" / name
        for inner, source in contents.items():
            (folder / inner).mkdir(parents=True)
            mount = [*self._enter, "mount", "--bind", "-o", "ro", str(source), str(folder / inner)]
            subprocess.run(mount, timeout=_READY_S, check=True)
        return folder

    @contextmanager
    def cut(self, address: str) -> Iterator[None]:
        """A pod's network is cut while the block lasts: what it sends and what is sent to it is lost."""
        with self._dropping(("PREROUTING", "-s", address), ("POSTROUTING", "-d", address)):
            yield

    @contextmanager
    def cut_from_api(self, address: str) -> Iterator[None]:
        """A pod and the API server do not hear of each other while the block lasts."""
        there = ("PREROUTING", "-s", address, "-d", first_address(self.network.services))
        back = ("POSTROUTING", "-d", address, "-p", "tcp", "--sport", str(API_PORT))
        with self._dropping(there, back):
            yield

    @contextmanager
    def _dropping(self, *rules: tuple[str, ...]) -> Iterator[None]:
        for rule in rules:
            self._iptables("-I", *rule)
        try:
            yield
        finally:
            for rule in rules:
                self._iptables("-D", *rule)

    def _iptables(self, action: str, *rule: str) -> None:
        command = ("iptables", "-w", "-t", "mangle", action, *rule, "-j", "DROP")
        subprocess.run([*self._enter, *command], timeout=_READY_S, check=True)

    def restart_containerd(self) -> None:
        """SIGKILL, then a new one; containers run on."""
        self.programs.kill("containerd")
        self._start_containerd()

    def collect(self, target: Path) -> None:
        """Everything that helps to understand a failure, into a folder."""
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.folder / "logs", target / "logs")
        shutil.copytree(self.folder / "pods", target / "pods", ignore_dangling_symlinks=True)
        for name, asked in {
            "objects.txt": ("get", "all,pvc,cm,netpol,pdb,endpointslices,inferencepools", "-A", "-o", "wide"),
            "pools.yaml": ("get", "inferencepools", "-A", "-o", "yaml"),
            "pods.txt": ("describe", "pods", "-A"),
            "events.txt": ("get", "events", "-A", "--sort-by=.lastTimestamp"),
        }.items():
            (target / name).write_text(self.api.kubectl(*asked, check=False))

    # -- start

    def bring_up(self, archive: Path) -> None:
        """Ready to run pods of the images in an archive."""
        self.api.bring_up({"allocate-node-cidrs": "true", "cluster-cidr": self.network.pods, "node-cidr-mask-size": 24})
        self._start_containerd()
        self.load(archive)
        self._start_kubelet()
        config = self.api.kubeconfig_of_user("system:kube-scheduler")
        flags = as_flags({"kubeconfig": config, "leader-elect": "false", "secure-port": 0})
        self.programs.start("kube-scheduler", [tool("kube-scheduler"), *flags])
        self._start_proxy()
        self._start_dns()
        self.programs.until("kubelet", self._ready, _READY_S)
        self._start_policies()

    @property
    def _socket(self) -> str:
        return str(self.folder / "containerd.sock")

    def _start_containerd(self) -> None:
        """What it starts itself it finds on PATH."""
        packages = [debian.unpacked(name) for name in _PACKAGES]
        (self.folder / "cni").mkdir(exist_ok=True)
        pods = node_files.pod_network(self.folder / "cni-state", self.network)
        (self.folder / "cni/10-pods.conflist").write_text(json.dumps(pods))
        config = self.folder / "containerd.toml"
        config.write_text(node_files.containerd_toml(self.folder, self._socket, packages[2] / "usr/lib/cni"))
        path = ":".join([*(f"{package}/usr/bin:{package}/usr/sbin" for package in packages), os.environ["PATH"]])
        server = packages[0] / "usr/bin/containerd"
        self.programs.start("containerd", [server, "--config", config], {"PATH": path})
        self.programs.until("containerd", self._containerd_answers, _READY_S)

    def _containerd_answers(self) -> bool:
        try:
            self.ctr("version")
        except ClusterError:
            return False
        return True

    def _start_kubelet(self) -> None:
        (self.folder / "resolv.conf").write_text(f"nameserver {self.network.node_address}\n")
        config = self.folder / "kubelet.yaml"  # YAML contains JSON
        config.write_text(json.dumps(node_files.kubelet_config(self.folder, self._socket, self.network)))
        flags = {
            "config": config,
            "kubeconfig": self.api.kubeconfig_of_user(f"system:node:{NODE}"),
            "hostname-override": NODE,
            "node-ip": self.network.node_address,
            "cert-dir": self.folder / "kubelet-pki",
        }
        self.programs.start("kubelet", [tool("kubelet"), *as_flags(flags)])

    def _start_proxy(self) -> None:
        flags = {
            "kubeconfig": self.api.kubeconfig_of_user("system:kube-proxy"),
            "hostname-override": NODE,
            "proxy-mode": "iptables",
            "cluster-cidr": self.network.pods,
            "conntrack-max-per-core": 0,  # these are the whole machine's
            "conntrack-tcp-timeout-established": "0s",
            "conntrack-tcp-timeout-close-wait": "0s",
        }
        self.programs.start("kube-proxy", [tool("kube-proxy"), *as_flags(flags)])

    def _start_dns(self) -> None:
        corefile = self.folder / "Corefile"
        corefile.write_text(node_files.corefile(self.api.kubeconfig, self.network))
        self.programs.start("coredns", [tool("coredns"), "-conf", corefile])

    def _start_policies(self) -> None:
        """Once the node is known: it looks for that."""
        flags = {
            "kubeconfig": self.api.kubeconfig,
            "hostname-override": NODE,
            "service-cluster-ip-range": self.network.services,
        }
        self.programs.start("netpol", [tool("netpol"), *as_flags(flags)])

    def _ready(self) -> bool:
        node = self.api.kubectl(
            "get", "node", NODE, "-o", "jsonpath={.status.conditions[?(@.type=='Ready')].status}", check=False
        )
        account = self.api.kubectl("get", "serviceaccount", "default", "-o", "name", check=False)
        return node == "True" and account.strip() == "serviceaccount/default"


def fetch() -> None:
    """What a node takes from Debian's packages."""
    debian.installed(*_COMMANDS)
    for package in _PACKAGES:
        debian.unpacked(package)


@contextmanager
def node(archive: Path) -> Iterator[Node]:
    """A few at a time on a machine. `archive`: as `images.archive()` makes it."""
    if os.geteuid() != 0:
        raise ClusterError("a node needs root: namespaces, mounts and control groups (the API server alone does not)")
    fetch()
    with (
        free_network() as network,
        folders.temporary("prefixpool-node") as folder,
        cgroup(network.cgroup),
        namespaces(folder, network) as enter,
    ):
        cluster = Node(folder, enter, network)
        try:
            cluster.bring_up(archive)
            yield cluster
        finally:
            cluster.programs.stop_all()
