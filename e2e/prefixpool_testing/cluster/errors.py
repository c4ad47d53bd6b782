"""What the harness tells people."""

from __future__ import annotations


class ClusterError(Exception):
    """The cluster can't be had: what is wrong, where, and what to do."""
