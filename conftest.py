"""Test settings for the whole repository."""

import asyncio
import operator
import os
from pathlib import Path

from hypothesis import settings

# In CI the same examples every time: a red run must mean a changed product. Elsewhere hypothesis explores.
settings.register_profile("explore", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "explore")

# looptime asks the policy for a loop before every test, synchronous ones too. A policy that was never told anything makes
# one, which nobody closes: a ResourceWarning, hence an error, in whichever test the collector runs.
asyncio.set_event_loop(None)

# pytest calls operator/tests/test_x.py `operator.tests.test_x` and imports the parents first. Without a path of its own,
# the standard library's `operator` would be replaced by our folder, and whoever imports it next would find nothing there.
operator.__path__ = [str(Path(__file__).parent / "operator")]
