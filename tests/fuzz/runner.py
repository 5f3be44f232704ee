"""Try inputs on a target, and keep one input of each fault found."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz.target import Found, Target, tried, where

_BATCHES = 50


@dataclass
class Run:
    """`tried`: number of inputs; `accepted`: number of inputs without an error; `slowest`: wall-clock seconds of the
    slowest."""

    target: Target
    tried: int = 0
    accepted: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    faults: dict[tuple[str, str], Found] = field(default_factory=dict)

    def one(self, value: Any) -> None:
        """Try an input. A fault is recorded, and the campaign continues."""
        begin = time.perf_counter()
        try:
            self.accepted += tried(self.target, value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also a Hang and SystemExit: both are faults of a reader
            self._keep(error, repr(value))
        self.tried += 1
        self.slowest = max(self.slowest, time.perf_counter() - begin)

    def _keep(self, error: BaseException, example: str) -> None:
        key = type(error).__name__, where(error)
        before = self.faults.get(key)
        if before is None:
            self.faults[key] = Found(f"{key[0]}: {str(error)[:200]}", key[1], example)
        else:
            shorter = min(before.example, example, key=len)
            self.faults[key] = dataclasses.replace(before, example=shorter, times=before.times + 1)


def around(target: Target, number: int, **options: Any) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Return a decorator for a function of one input. The decorator makes a hypothesis test that calls the function
    with `number` inputs of the target. No inputs of earlier runs are used. `options`: further arguments of
    hypothesis.settings."""
    with_settings = settings(
        max_examples=number,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        **options,
    )
    return lambda function: with_settings(given(target.inputs)(function))


def campaign(target: Target, number: int, start: int) -> Run:
    """Try at least `number` inputs, if the target has so many. The same `start` gives the same inputs, and different
    starts give different inputs: no two starts share a batch's seed."""
    run = Run(target)
    begin = time.process_time()
    for batch in range(_BATCHES):
        if run.tried >= number:
            break
        own = seed(1000 * start + batch)
        own(around(target, min(number - run.tried, 2000), phases=(Phase.generate,))(run.one))()
    run.seconds = time.process_time() - begin
    return run
