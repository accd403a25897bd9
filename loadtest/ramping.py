"""A ramp as it goes: each step judged by what was counted during it, until one breaks."""

import arrivals
from figures import Counts, figures
from thresholds import Judgement, Thresholds


class Ramping:
    def __init__(self, rate: arrivals.Ramp, thresholds: Thresholds) -> None:
        self._rate, self._thresholds = rate, thresholds
        self._step, self._before = 0, Counts()
        self.held_per_s = 0.0
        self.broken: list[Judgement] = []

    def ended(self, second: float, counts: Counts) -> bool:
        """Judge the step that is over, if one is; whether it broke."""
        if self._rate.step(second) == self._step:
            return False
        during = counts.since(self._before)
        self.broken = [one for one in self._judge(during) if one.broken]
        if self.broken:
            return True
        self.held_per_s = self._rate.at(self._step * self._rate.step_s)
        self._step, self._before = self._step + 1, counts
        return False

    def judge(self) -> list[Judgement]:
        return self._thresholds.judge_ramp(self.held_per_s, self._rate.first_per_s)

    def _judge(self, during: Counts) -> list[Judgement]:
        judged = self._thresholds.judge_step(figures(during, self._rate.step_s))
        # Steps are compared by their answers, and a step that the generator did not send says nothing of the service.
        return [*judged, Judgement("dropped", 0, during.dropped)]

    def __str__(self) -> str:
        if not self.broken:
            return f"ramp: held {self.held_per_s:g} requests/s and was not broken; let it run longer or begin higher"
        rate = self._rate.at(self._step * self._rate.step_s)
        broken = "; ".join(map(str, self.broken))
        return f"ramp: broke at {rate:g} requests/s ({broken}); the step before held, at {self.held_per_s:g} requests/s"
