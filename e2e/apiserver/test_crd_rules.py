"""Each rule of the CRD on a real API server: refused with its message and at its field, or accepted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.pool_rules import IMMUTABLE, RULES, merged, pool

BAD = [(message, spec) for message, _, specs in RULES for spec in specs]
GOOD = [spec for _, specs, _ in RULES for spec in specs]
CHANGES = [
    (message, before, change, refused)
    for message, before, *lists in IMMUTABLE
    for refused, changes in zip((False, True), lists, strict=True)
    for change in changes
]


@pytest.fixture(scope="module", autouse=True)
def crd(api: ApiServer, pytestconfig: pytest.Config) -> None:
    api.kubectl("apply", "--server-side", "-f", str(Path(pytestconfig.rootpath, "crds")))
    api.until_established("inferencepools.prefixpool.dev")


def sent(api: ApiServer, namespace: str, verb: str, objects: list[dict[str, Any]]) -> dict[str, str]:
    """What was said of each object that was refused, by its name. Nothing is kept."""
    items = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    text = api.kubectl(verb, "--dry-run=server", "-n", namespace, "-f", "-", stdin=items, check=False)
    parts = re.split(r'InferencePool(?:\.prefixpool\.dev)? "([^"]*)" is invalid: ', text)
    refused = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert text.count("(server dry run)") + len(refused) == len(objects), text
    return refused


def test_what_breaks_a_rule_is_refused_with_its_message_alone(api: ApiServer, namespace: str) -> None:
    refused = sent(api, namespace, "create", [pool(spec, f"bad-{index}") for index, (_, spec) in enumerate(BAD)])
    for index, (message, spec) in enumerate(BAD):
        told = refused.pop(f"bad-{index}", "")
        assert message in told, spec
        assert told.count("Invalid value") == 1, told
        assert told.startswith("spec"), told
    assert refused == {}


def test_what_keeps_the_rules_is_accepted(api: ApiServer, namespace: str) -> None:
    assert sent(api, namespace, "create", [pool(spec, f"good-{index}") for index, spec in enumerate(GOOD)]) == {}


def test_what_cannot_change_is_refused_and_what_can_is_not(api: ApiServer, namespace: str) -> None:
    before = [pool(old, f"pool-{index}") for index, (_, old, _, _) in enumerate(CHANGES)]
    api.apply(*(merged(one, {"metadata": {"namespace": namespace}}) for one in before))
    after = [merged(one, {"spec": change}) for one, (_, _, change, _) in zip(before, CHANGES, strict=True)]
    told = sent(api, namespace, "replace", after)
    for index, (message, _, change, refused) in enumerate(CHANGES):
        assert (message in told.get(f"pool-{index}", "")) is refused, change
    assert len(told) == sum(refused for *_, refused in CHANGES)


@pytest.mark.parametrize("name", ["a" * 41, "1a", "a.b"])
def test_names_that_children_could_not_bear_are_refused(api: ApiServer, namespace: str, name: str) -> None:
    assert "at most 40 lower-case letters" in sent(api, namespace, "create", [pool({}, name)])[name]
