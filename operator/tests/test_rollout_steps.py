"""`rollout.step` alone, through anything that may happen: the promise holds after each step, and it comes to an end."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixpool_operator.pod import Container, Pod
from prefixpool_operator.rollout import Step, Target, step
from prefixpool_testing.agent_info import info


def pod(ordinal: int, revision: str = "old", *, ready: bool = True, value: int = 0, **changes: Any) -> Pod:
    worker = Container(name="worker", started=changes.pop("started", ready), restarts=changes.pop("restarts", 0))
    router = Container(name="router", image=changes.pop("image", "r1"), id=changes.pop("id", "first"), started=True)
    values: dict[str, Any] = {
        "name": f"p-{ordinal}", "uid": f"u{ordinal}", "component": "worker", "ordinal": ordinal, "revision": revision,
        "restarted_at": "", "router_before": "", "node": "n", "ready": ready, "terminating_s": None, "unschedulable": "",
        "created_s": 0.0, "containers": (router, worker), "info": info(f"p-{ordinal}", resident_blocks=value),
    }  # fmt: skip
    return Pod(**(values | changes))


def target(replicas: int, revision: str = "new", **changes: Any) -> Target:
    return Target(replicas=replicas, revision=revision, **({"router_image": "r1"} | changes))


def names(found: Step) -> tuple[list[str], list[str]]:
    return [one.name for one in found.delete], [one.name for one in found.patch]


def test_nothing_to_do() -> None:
    assert step([pod(0), pod(1)], target(2, "old")) == Step()


def test_the_least_valuable_goes_first_and_no_more_than_may_be_down() -> None:
    pods = [pod(0, value=5), pod(1, value=9), pod(2, value=1), pod(3, value=5)]
    assert names(step(pods, target(4))) == (["p-2"], [])
    assert names(step(pods, target(4, max_unavailable=3))) == (["p-2", "p-3", "p-0"], [])


def test_nothing_that_serves_goes_while_another_is_down() -> None:
    found = step([pod(0), pod(1, "new", ready=False), pod(2)], target(3))
    assert names(found) == ([], [])
    assert found.waits_for == "p-1"


def test_pods_that_never_came_up_go_at_once_also_when_a_spec_is_fixed() -> None:
    broken = [pod(n, "bad", ready=False, started=False, restarts=4) for n in range(3)]
    assert names(step([*broken, pod(3, "old")], target(4, "fixed"))) == (["p-0", "p-1", "p-2"], [])


def test_a_revision_that_fails_stops_even_where_more_may_be_down() -> None:
    pods = [pod(0), pod(1), pod(2), pod(3, "new", ready=False, started=False, restarts=4)]
    found = step(pods, target(4, max_unavailable=2))
    assert names(found) == ([], [])
    assert [one.name for one in found.failing] == ["p-3"]


def test_a_hung_pod_is_replaced_before_one_that_serves() -> None:
    assert names(step([pod(0), pod(1, ready=False, started=True), pod(2)], target(3))) == (["p-1"], [])
    assert names(step([pod(0, "new"), pod(1, ready=False, started=True)], target(2))) == (["p-1"], [])


def test_hung_pods_are_replaced_a_few_at_a_time() -> None:
    hung = [pod(n, ready=False, started=True) for n in range(3)]
    assert names(step(hung, target(3))) == (["p-2"], [])
    assert names(step([*hung[:2], pod(2, "new", ready=False, started=False)], target(3))) == ([], [])


def test_surplus_pods_are_left_to_the_stateful_set() -> None:
    assert names(step([pod(0), pod(1), pod(7)], target(2, max_unavailable=2))) == (["p-1", "p-0"], [])


def test_a_router_is_replaced_in_place_one_after_the_other() -> None:
    pods = [pod(0, "new"), pod(1, "new")]
    assert names(step(pods, target(2, router_image="r2"))) == ([], ["p-1"])
    asked = pod(1, "new", image="r2", router_before="first")  # the kubelet has not looked yet: the pod is still ready
    assert names(step([pods[0], asked], target(2, router_image="r2"))) == ([], [])
    done = pod(1, "new", image="r2", router_before="first", id="second")
    assert names(step([pods[0], done], target(2, router_image="r2"))) == ([], ["p-0"])


def test_engines_go_before_routers_unless_the_rollout_has_stopped() -> None:
    pods = [pod(0, "old"), pod(1, "new")]
    assert names(step(pods, target(2, router_image="r2"))) == (["p-0"], [])
    failing = [pod(0, "old"), pod(1, "new", ready=False, started=False, restarts=4, image="r2")]
    assert names(step(failing, target(2, router_image="r2", max_unavailable=2))) == ([], ["p-0"])


_OPS = st.one_of(
    st.tuples(st.just("edit"), st.sampled_from(["a", "b", "bad"])),
    st.tuples(st.just("router"), st.sampled_from(["r1", "r2"])),
    st.tuples(st.just("operate"), st.just("")),
    st.tuples(st.just("kubelet"), st.integers(0, 5)),
)


class World:
    """Pods that change as a kubelet and a StatefulSet change them."""

    def __init__(self, replicas: int, unavailable: int) -> None:
        self.target = target(replicas, "a", max_unavailable=unavailable)
        self.pods = {n: pod(n, "a", id="r1") for n in range(replicas)}

    def operate(self) -> Step:
        found = step(self.pods.values(), self.target)
        for one in found.delete:
            self.pods[one.ordinal] = pod(one.ordinal, one.revision, ready=one.ready, terminating_s=0.0)
        for one in found.patch:
            self._set(one, router_before=one.containers[0].id, image=self.target.router_image, id=one.containers[0].id)
        return found

    def _set(self, one: Pod, **changes: Any) -> None:
        keep = {"image": one.containers[0].image, "id": one.containers[0].id, "router_before": one.router_before}
        self.pods[one.ordinal] = pod(one.ordinal, one.revision, **({"ready": one.ready} | keep | changes))

    def kubelet(self, ordinal: int) -> None:
        one = self.pods[ordinal % self.target.replicas]
        router = one.containers[0]
        if one.terminating_s is not None:
            self.pods[one.ordinal] = pod(one.ordinal, self.target.revision, ready=False, image=self.target.router_image)
        elif one.revision == "bad":
            self._set(one, ready=False, restarts=4)
        elif router.id != router.image:  # the old router ends before the new one is up
            self._set(one, ready=False, id=router.image)
        else:
            self._set(one, ready=True)

    def available(self) -> int:
        return sum(one.available for one in self.pods.values())


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.lists(_OPS, max_size=60))
def test_the_promise_holds_and_it_ends(replicas: int, unavailable: int, ops: list[tuple[str, Any]]) -> None:
    world = World(replicas, unavailable)
    for name, value in ops:
        if name == "edit":
            world.target = target(replicas, value, max_unavailable=unavailable, router_image=world.target.router_image)
        elif name == "router":
            world.target = target(replicas, world.target.revision, max_unavailable=unavailable, router_image=value)
        elif name == "operate":
            world.operate()
        else:
            world.kubelet(value)
        assert world.available() >= replicas - unavailable
    world.target = target(replicas, "good", max_unavailable=unavailable, router_image="r2")
    for _ in range(4 * replicas + 8):
        world.operate()
        for ordinal in range(replicas):
            world.kubelet(ordinal)
    assert world.operate() == Step()
    assert all(world.target.updated(one) and one.available for one in world.pods.values())
