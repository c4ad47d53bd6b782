"""When something that is asked again and again, and does not answer, is taken to hang. Pure."""

from __future__ import annotations


class Silence:
    """Counts from `began_s`. Both must be exceeded: who asks may itself have been stopped for a while."""

    def __init__(self, began_s: float, *, allowed_s: float, questions: int = 3) -> None:
        self.allowed_s = allowed_s
        self._questions = questions
        self._heard_s = began_s
        self._missed = 0

    def answered(self, now_s: float) -> None:
        """It lives."""
        self._heard_s = now_s
        self._missed = 0

    def missed(self, now_s: float) -> bool:
        """One more question without an answer; whether it hangs."""
        self._missed += 1
        return self._missed >= self._questions and now_s - self._heard_s >= self.allowed_s
