"""How long a step of the simulated engine takes. Pure.

    step = step_s + sequence_s * decodes + context_s * context tokens of the decodes
         + sum over prefills of (p1 * m + p2 * m * (m + 2 * c))
         + request_s * requests that begin + restore_s * tokens restored from below the device
         + read_s * those of them that are read from disk

with m new tokens behind c computed ones: the linear part is the matrix products, the quadratic one attention. `request_s`
stands for what a request costs around its steps (parsing, tokenising, passing between processes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Prefill(NamedTuple):
    """One prompt chunk of a step, in tokens."""

    new: int
    behind: int


class StepShape(NamedTuple):
    """What a step computes."""

    decodes: int
    context_tokens: int  # of all decoding sequences together
    prefills: Sequence[Prefill]
    requests: int = 0  # that begin with this step
    restored_tokens: int = 0  # from host memory, through which goes what is on disk
    read_tokens: int = 0  # of these, from disk


class TimingModel(NamedTuple):
    """Seconds. Defaults: vLLM 0.32 with SmolLM2-135M (bf16) on one CPU core of the machine of this fit (bench/sim_fit.py).

    Relative errors there, median / p95: fitted points 1.8 / 5.8 %; held-out requests alone 5.4 / 13 % for first tokens and
    5.3 / 11 % for whole answers; 24 overlapping ones, the engine overloaded, 7.4 / 8.1 % and 5.2 / 6.3 %, all predicted too
    fast. `restore_s` and `read_s` are from another measurement: 22 ms for 4,096 tokens, 55 ms more from disk (research:
    vllm.md 4.2).
    """

    step_s: float = 0.0385
    sequence_s: float = 3.57e-3
    context_s: float = 3.56e-6
    prefill_s: float = 2.64e-3
    prefill_s2: float = 4.26e-7
    request_s: float = 2.2e-3
    restore_s: float = 5.4e-6
    read_s: float = 1.34e-5

    def seconds(self, shape: StepShape) -> float:
        """Duration of one step."""
        prefill = sum(self.prefill_s * m + self.prefill_s2 * m * (m + 2 * c) for m, c in shape.prefills)
        decode = self.sequence_s * shape.decodes + self.context_s * shape.context_tokens
        around = self.request_s * shape.requests + sum(self.load_s(shape))
        return self.step_s + decode + prefill + around

    def load_s(self, shape: StepShape) -> tuple[float, float]:
        """Of one step: from host memory to the device, and from disk to host memory."""
        return self.restore_s * shape.restored_tokens, self.read_s * shape.read_tokens
