"""Every pool in examples/ can be read, keeps the rules, and fits its device."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from prefixpool.api.sizing import known_device, known_shape, sizing_request
from prefixpool.api.spec import PoolSpec
from prefixpool.sizing.plan import LimitedBy, SizingPlan, plan

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def plan_of(file: Path) -> SizingPlan:
    obj: dict[str, Any] = yaml.safe_load(file.read_text())
    spec = PoolSpec.from_object(obj)
    known = known_shape(spec.model, spec.engine.kind)
    device = known_device(spec.accelerator)
    assert known
    assert device
    return plan(sizing_request(spec, known.shape, device))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_is_a_pool_that_fits(file: Path) -> None:
    found = plan_of(file)
    assert found.fits, found.reason
    assert found.device_per_replica.tokens >= found.max_model_len


def test_the_examples_show_what_they_say() -> None:
    plans = {file.stem: plan_of(file) for file in EXAMPLES}
    assert len(plans) == 7
    assert 2 <= plans["llama-3.1-8b-l4"].replicas <= 40
    assert plans["deepseek-v3-h200"].limited_by is LimitedBy.HOST_KV
    assert plans["shared-disk"].disk_per_replica.tokens > plans["shared-disk"].host_per_replica.tokens


def test_the_pool_in_the_readme_can_be_read() -> None:
    begins, *lines = (ROOT / "README.md").read_text().partition("    apiVersion: ")[1:]
    block = (begins + "".join(lines)).split("\n\n")[0]
    assert PoolSpec.from_object(yaml.safe_load(block)).kv_budget
