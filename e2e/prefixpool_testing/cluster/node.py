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

from prefixpool_testing.cluster import cache, debian, folders, images
from prefixpool_testing.cluster.api_server import KUBERNETES_SERVICE, NODE, SERVICE_CIDR, ApiServer, Place, as_flags
from prefixpool_testing.cluster.cgroups import cgroup
from prefixpool_testing.cluster.errors import ClusterError
from prefixpool_testing.cluster.namespaces import NODE_ADDRESS, namespaces
from prefixpool_testing.cluster.programs import Programs
from prefixpool_testing.cluster.toolchain import tool

POD_CIDR: Final = "198.18.128.0/24"
API_PORT: Final = 6443
_CGROUP: Final = "prefixpool-node"
_READY_S: Final = 90.0
_IMPORT_S: Final = 300.0
_COMMANDS: Final = ("openssl", "setpriv", "ip", "iptables", "ipset", "conntrack")


class Node:
    """A running cluster."""

    def __init__(self, folder: Path, enter: Sequence[str]) -> None:
        self.folder = folder
        self.programs = Programs(folder / "logs", enter)
        self.api = ApiServer(folder, Place(NODE_ADDRESS, api=API_PORT, etcd=2379, etcd_peer=2380), self.programs)
        self._enter = tuple(enter)

    def to_share(self) -> tuple[str, tuple[str, ...]]:
        """For another process of this machine, until the node ends: what `of` takes."""
        return str(self.folder), self._enter

    @classmethod
    def of(cls, shared: tuple[str, Sequence[str]]) -> Self:
        """Another process's. It can do all but start programs, and stop those that run."""
        folder, enter = shared
        return cls(Path(folder), enter)

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
        there = ("PREROUTING", "-s", address, "-d", KUBERNETES_SERVICE)
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
        self.api.bring_up({"allocate-node-cidrs": "true", "cluster-cidr": POD_CIDR, "node-cidr-mask-size": 24})
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
        packages = [debian.unpacked(name) for name in ("containerd", "runc", "containernetworking-plugins")]
        (self.folder / "cni").mkdir(exist_ok=True)
        (self.folder / "cni/10-pods.conflist").write_text(json.dumps(_pod_network(self.folder / "cni-state")))
        config = self.folder / "containerd.toml"
        config.write_text(_containerd_toml(self.folder, self._socket, packages[2] / "usr/lib/cni"))
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
        config = self.folder / "kubelet.yaml"
        config.write_text(json.dumps(_kubelet_config(self.folder, self._socket)))  # YAML contains JSON
        flags = {
            "config": config,
            "kubeconfig": self.api.kubeconfig_of_user(f"system:node:{NODE}"),
            "hostname-override": NODE,
            "node-ip": NODE_ADDRESS,
            "cert-dir": self.folder / "kubelet-pki",
        }
        self.programs.start("kubelet", [tool("kubelet"), *as_flags(flags)])

    def _start_proxy(self) -> None:
        flags = {
            "kubeconfig": self.api.kubeconfig_of_user("system:kube-proxy"),
            "hostname-override": NODE,
            "proxy-mode": "iptables",
            "cluster-cidr": POD_CIDR,
            "conntrack-max-per-core": 0,  # these are the whole machine's
            "conntrack-tcp-timeout-established": "0s",
            "conntrack-tcp-timeout-close-wait": "0s",
        }
        self.programs.start("kube-proxy", [tool("kube-proxy"), *as_flags(flags)])

    def _start_dns(self) -> None:
        corefile = self.folder / "Corefile"
        corefile.write_text(
            f"cluster.local {{\n  bind {NODE_ADDRESS}\n  errors\n"
            f"  kubernetes cluster.local {{\n    kubeconfig {self.api.kubeconfig}\n  }}\n}}\n"
        )
        self.programs.start("coredns", [tool("coredns"), "-conf", corefile])

    def _start_policies(self) -> None:
        """Once the node is known: it looks for that."""
        flags = {
            "kubeconfig": self.api.kubeconfig,
            "hostname-override": NODE,
            "service-cluster-ip-range": SERVICE_CIDR,
        }
        self.programs.start("netpol", [tool("netpol"), *as_flags(flags)])

    def _ready(self) -> bool:
        node = self.api.kubectl(
            "get", "node", NODE, "-o", "jsonpath={.status.conditions[?(@.type=='Ready')].status}", check=False
        )
        account = self.api.kubectl("get", "serviceaccount", "default", "-o", "name", check=False)
        return node == "True" and account.strip() == "serviceaccount/default"


@contextmanager
def node(archive: Path) -> Iterator[Node]:
    """One at a time on a machine. `archive`: as `images.archive()` makes it."""
    if os.geteuid() != 0:
        raise ClusterError("a node needs root: namespaces, mounts and control groups (the API server alone does not)")
    debian.installed(*_COMMANDS)
    with (
        cache.locked(cache.folder() / "node.lock"),
        folders.temporary("prefixpool-node") as folder,
        cgroup(_CGROUP),
        namespaces(folder) as enter,
    ):
        cluster = Node(folder, enter)
        try:
            cluster.bring_up(archive)
            yield cluster
        finally:
            cluster.programs.stop_all()


def _pod_network(state: Path) -> object:
    """Each pod on a cable of its own: all traffic is routed by the node, and so passes kube-proxy's rules."""
    ipam = {
        "type": "host-local",
        "dataDir": str(state),
        "ranges": [[{"subnet": POD_CIDR}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "ptp", "ipam": ipam}]}


def _containerd_toml(folder: Path, socket: str, cni: Path) -> str:
    return f"""\
version = 2
root = "/run/prefixpool/containerd"  # in memory, and gone with the node: unpacked images are many small files
state = "/run/prefixpool/containerd-state"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{images.PAUSE}"
  restrict_oom_score_adj = true  # where the machine is a container itself, it can't be lowered
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "{folder}/cni"
"""


def _kubelet_config(folder: Path, socket: str) -> object:
    resolv = folder / "resolv.conf"
    resolv.write_text(f"nameserver {NODE_ADDRESS}\n")
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(folder / "pki/ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{_CGROUP}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "podLogsDir": str(folder / "pods"),
        "volumePluginDir": str(folder / "volume-plugins"),
        "clusterDomain": "cluster.local",
        "clusterDNS": [NODE_ADDRESS],
        "resolvConf": str(resolv),
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
    }
