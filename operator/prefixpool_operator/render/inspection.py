"""The Job that looks into a model's files. It leaves what it found as its pod's termination message."""

from __future__ import annotations

from typing import Final

from prefixpool.api.spec import PoolSpec
from prefixpool.sizing.inspection import EXIT_FAILED, EXIT_SETTINGS
from prefixpool_operator.identity import A_INSPECTS, Component, Identity
from prefixpool_operator.inspection import subject
from prefixpool_operator.observed import Raw, Settings
from prefixpool_operator.render import pods, volumes, worker
from prefixpool_operator.render.container import SECURITY

NAME: Final = "inspect"
_MESSAGE: Final = "/dev/termination-log"
_DEADLINE_S: Final = 900
_TRIES_MORE: Final = 6  # with growing pauses, ten minutes in all: a Hub, or a way to it, that is away for a while
_DEFINITE: Final = [EXIT_FAILED, EXIT_SETTINGS]
_MEMORY: Final = 1 << 30
# Images on CUDA ask for all devices in this variable, and NVIDIA's runtime, where it is the default, gives them.
_NO_DEVICES: Final[Raw] = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}


def inspection_job(identity: Identity, spec: PoolSpec, settings: Settings) -> Raw:
    """In the pool's namespace, with its volume and token, where its pods may run; without an accelerator."""
    pod = {
        **pods.common(spec),
        **pods.placement(spec),
        "restartPolicy": "Never",
        "containers": [_container(spec, settings)],
        "volumes": [{"name": "home", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}, *volumes.model_volumes(spec.model)],
    }
    found = identity.object(
        "batch/v1",
        "Job",
        identity.inspection,
        spec={
            "backoffLimit": _TRIES_MORE,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": NAME, "operator": "In", "values": _DEFINITE},
                    }
                ]
            },
            "activeDeadlineSeconds": _DEADLINE_S,
            "template": pods.template(identity, Component.INSPECTION, pod),
        },
    )
    found["metadata"]["annotations"] = {A_INSPECTS: subject(spec.model)}
    return found


def _container(spec: PoolSpec, settings: Settings) -> Raw:
    model = spec.model
    return {
        "name": NAME,
        "image": spec.engine.image or settings.worker_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["prefixpool-worker", "inspect", "--model", model.source, "--output", _MESSAGE],
        "args": ["--revision", model.revision] if model.revision else [],
        "env": worker.merged({"name": "HOME", "value": volumes.HOME}, _NO_DEVICES, *worker.given(spec)),
        "resources": {"requests": {"cpu": "100m", "memory": str(_MEMORY)}, "limits": {"memory": str(_MEMORY)}},
        "terminationMessagePath": _MESSAGE,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": SECURITY,
        "volumeMounts": [
            volumes.mount("home", volumes.HOME),
            volumes.mount("tmp", "/tmp"),
            *volumes.model_mounts(model),
        ],
    }
