"""Test settings for the whole repository."""

import os

from hypothesis import settings

# In CI the same examples every time: a red run must mean a changed product. Elsewhere hypothesis explores.
settings.register_profile("explore", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "explore")
