"""What a node's containerd, kubelet and DNS are told."""

from __future__ import annotations

from pathlib import Path

from prefixpool_testing.cluster import images
from prefixpool_testing.cluster.network import Network


def pod_network(state: Path, network: Network) -> object:
    """Each pod on a cable of its own: all traffic is routed by the node, and so passes kube-proxy's rules."""
    ipam = {
        "type": "host-local",
        "dataDir": str(state),
        "ranges": [[{"subnet": network.pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "ptp", "ipam": ipam}]}


def containerd_toml(folder: Path, socket: str, cni: Path) -> str:
    """Its whole configuration. `cni`: the folder of CNI's programs."""
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


def kubelet_config(folder: Path, socket: str, network: Network) -> object:
    """A KubeletConfiguration. The node's resolv.conf is in `folder`."""
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
        "cgroupRoot": f"/{network.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "podLogsDir": str(folder / "pods"),
        "volumePluginDir": str(folder / "volume-plugins"),
        "clusterDomain": "cluster.local",
        "clusterDNS": [network.node_address],
        "resolvConf": str(folder / "resolv.conf"),
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
    }


def corefile(kubeconfig: Path, network: Network) -> str:
    """CoreDNS answers for this cluster, and for nothing else."""
    return (
        f"cluster.local {{\n  bind {network.node_address}\n  errors\n"
        f"  kubernetes cluster.local {{\n    kubeconfig {kubeconfig}\n  }}\n}}\n"
    )
