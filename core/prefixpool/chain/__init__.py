"""The prefix chain: what router, agent and replay agree on without a tokenizer (design: 4).

`canonical()` turns a request into a seed and segments in the order in which the model reads them; `prefix_chain()` turns
those into boundaries: marks and geometric chunks, each with the hash of everything before it.
"""

from prefixpool.chain.boundary import PrefixChain, prefix_chain
from prefixpool.chain.canonical import Canonical, Segment, SegmentKind, canonical

__all__ = ["Canonical", "PrefixChain", "Segment", "SegmentKind", "canonical", "prefix_chain"]
