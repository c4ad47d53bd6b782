"""Helm's library has wheels for Linux on x86-64 only: elsewhere these tests are left out, and the header says so."""

import importlib.util
import os

_ABLE = importlib.util.find_spec("helm_python") is not None or bool(os.environ.get("CI"))
collect_ignore_glob = [] if _ABLE else ["test_chart_*.py"]


def pytest_report_header() -> str:
    return "" if _ABLE else "charts/tests are left out: there is no helm-python-sdk for this machine"
