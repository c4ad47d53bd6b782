"""What is cached, in the routers' words: joins the engine's KV events with the gate's notes. Pure: no clock, no I/O.

Facts behind it: research/residency.md and research/alignment.md; see `residency.Residency` for the interface.
"""

from prefixpool_agent.residency.boundaries import Changes
from prefixpool_agent.residency.limits import Limits
from prefixpool_agent.residency.residency import Finished, Residency
from prefixpool_agent.residency.table import TokenTable, VocabularyError, load_table
from prefixpool_agent.residency.template import read_template

__all__ = [
    "Changes",
    "Finished",
    "Limits",
    "Residency",
    "TokenTable",
    "VocabularyError",
    "load_table",
    "read_template",
]
