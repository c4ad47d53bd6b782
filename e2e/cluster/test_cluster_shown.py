"""What a person sees of pools in all their states; kept in build/e2e/shown/ to be read."""

from __future__ import annotations

import pytest

from prefixpool_testing.cluster import phases
from prefixpool_testing.cluster.product import POOL_S, PoolPlace

SHOWN = phases.OUT / "shown"


async def keep(place: PoolPlace, state: str, pool: str) -> str:
    """Both views of one pool."""
    wide = await place.kubectl("get", "ppool", pool, "-o", "wide")
    described = await place.kubectl("describe", "ppool", pool)
    SHOWN.mkdir(parents=True, exist_ok=True)
    (SHOWN / f"{state}.txt").write_text(f"$ kubectl get ppool -o wide\n{wide}\n$ kubectl describe ppool {pool}\n{described}")
    return wide + described


@pytest.mark.long
async def test_healthy_and_rolling(place: PoolPlace) -> None:
    await place.apply("chat", replicas=2)
    await place.until_ready("chat", 2)
    assert "ReplicasReady" in await keep(place, "healthy", "chat")
    await place.apply("chat", replicas=2, engine={"kind": "sim", "extraArgs": ["--time-scale=0.5"]})
    await place.until("chat", "Progressing", "True", "RollingOut", within_s=POOL_S)
    assert "RollingOut" in await keep(place, "rolling", "chat")
    await place.until_ready("chat", 2)


async def test_too_big(place: PoolPlace) -> None:
    await place.apply(
        "big", model={"source": "meta-llama/Llama-3.1-70B-Instruct"}, accelerator={"resource": "cpu", "memory": "4Gi"}
    )
    message = await place.until("big", "Sized", "False", "DoesNotFit", within_s=POOL_S)
    assert message in await keep(place, "too-big", "big")
    assert await place.workers("big") == []


async def test_crash_looping(place: PoolPlace) -> None:
    await place.apply("broken", replicas=1, engine={"kind": "sim", "extraArgs": ["--no-such-flag=1"]})
    message = await place.until("broken", "Degraded", "True", "CrashLooping", within_s=POOL_S)
    assert message in await keep(place, "crash-looping", "broken")


async def test_a_secret_that_is_missing(place: PoolPlace) -> None:
    await place.apply("keyless", replicas=1, auth={"keysSecret": "clients"})
    message = await place.until("keyless", "Degraded", "True", "SecretMissing", within_s=POOL_S)
    assert 'secret "clients" not found' in message
    assert message in await keep(place, "secret-missing", "keyless")
    await place.kubectl("create", "secret", "generic", "clients", "--from-literal=keys=")
    await place.until_ready("keyless", 1)
    await place.until("keyless", "Degraded", "False", "Healthy", within_s=POOL_S)
