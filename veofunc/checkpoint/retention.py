"""Which steps are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any

__all__ = ["Retention"]


@dataclass(frozen=True)
class Retention:
    """What is kept, besides the newest step and the one just saved; all of it, if nothing is said.

    Attributes:
        last: so many of the newest.
        every: those whose number is a multiple of it.
        best: (metric, how many, "min" or "max"): those with the lowest or highest value.
    """

    last: int | None = None
    every: int | None = None
    best: tuple[str, int, str] | None = None

    @staticmethod
    def of(keep_last: object, keep_every: object, keep_best: Any) -> Retention:
        """Checked options.

        Raises:
            TypeError: a number is no int, or `keep_best` is no tuple as it must be.
            ValueError: a number is below 1.
        """
        last, every = _positive("keep_last", keep_last), _positive("keep_every", keep_every)
        if keep_best is None:
            return Retention(last, every)
        if (
            not isinstance(keep_best, tuple)
            or len(keep_best) not in (2, 3)
            or not isinstance(keep_best[0], str)
            or keep_best[1] is None
        ):
            raise TypeError(f'keep_best must be as ("loss", 2) or ("accuracy", 2, "max"), got {keep_best!r}')
        name, number, direction = (*keep_best, "min")[:3]
        if direction not in ("min", "max"):
            raise ValueError(f'keep_best must end in "min" or "max", got {direction!r}')
        return Retention(last, every, (name, _positive("the number in keep_best", number) or 1, direction))

    def doomed(self, metrics: Mapping[int, Mapping[str, float]], saved: int) -> list[int]:
        """The steps to remove.

        Args:
            metrics: those of every complete step.
            saved: the step just saved.
        """
        if (self.last, self.every, self.best) == (None, None, None):
            return []
        steps = sorted(metrics)
        kept = {saved, *steps[-(self.last or 1) :]}
        if self.every:
            kept |= {step for step in steps if step % self.every == 0}
        if self.best:
            name, number, direction = self.best
            rated = [s for s in steps if name in metrics[s] and not isnan(metrics[s][name])]
            sign = 1 if direction == "min" else -1
            kept |= {*sorted(rated, key=lambda step: (sign * metrics[step][name], -step))[:number]}
        return [step for step in steps if step not in kept]


def _positive(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int or None, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, or None, got {value}")
    return value
