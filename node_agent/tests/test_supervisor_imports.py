"""The supervisor stays small: it is PID 1 of every worker."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
before = set(sys.modules)
import prefixpool_agent.supervisor.__main__
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names) - {"prefixpool", "prefixpool_agent"}))
"""


def test_supervisor_needs_nothing_but_the_standard_library() -> None:
    seen = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"
