"""What agents and routers rely on in an engine, as tests that run on every kind of engine (design.md 9.1).

A test module makes these classes its own:

    class TestAnswers(AnswerContract): ...

and gives the fixtures `engine_worker` (a worker started with `OPTIONS`) and `kv_events` (a listener to it, connected);
for `TierContract` the fixture `tiered_engine` (an engine with host memory and disk).
"""

from prefixpool_testing.engine_contract.answers import AnswerContract
from prefixpool_testing.engine_contract.blocks import BlockContract
from prefixpool_testing.engine_contract.limits import LimitContract
from prefixpool_testing.engine_contract.tiers import TierContract

__all__ = ["AnswerContract", "BlockContract", "LimitContract", "TierContract"]
