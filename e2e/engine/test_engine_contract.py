"""Real vLLM keeps the contract of engines, as the sim does (e2e/behaviour/test_behaviour_engine_contract.py)."""

from __future__ import annotations

import pytest

from prefixpool_testing.engine_contract import AnswerContract, BlockContract, LimitContract

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


class TestVllmAnswers(AnswerContract):
    """One by one."""


class TestVllmBlocks(BlockContract):
    """KV events."""


class TestVllmLimits(LimitContract):
    """Load and leaving."""
