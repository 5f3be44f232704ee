"""What a probe comes to: figures, and passed, failed or skipped."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"

FAILURES = (
    "signal",  # died of a signal
    "hang",  # ran past its time
    "oom",  # killed from outside, or refused memory
    "wedged",  # could not even be killed
    "exit",  # left with an exit status of its own
    "exception",  # raised
    "bound",  # further from the reference than its bound
    "mismatch",  # not equal where equality is promised
    "nonfinite",  # NaN or infinity
    "version",  # another version than expected
    "hardware",  # the driver says that a card is at fault
    "incomplete",  # ended without its result, or with a cut one
)
DETAIL_LIMIT = 8192


class ProbeFailure(Exception):
    """Ends a probe as failed. `kind` is one of FAILURES, `reason` one sentence."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


class Skip(Exception):
    """Ends a probe as skipped; the message says why."""


def number(value: float) -> float | str:
    """A float as strict JSON can hold it: the non-finite ones as "nan", "inf" and "-inf"."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def ratio(error: float, bound: float) -> float:
    """Error over bound; a bound of zero allows only an error of zero. NaN stays NaN, so it is never within."""
    if bound:
        return error / bound
    return 0.0 if error == 0 else math.nan if math.isnan(error) else math.inf


@dataclass(frozen=True)
class Figure:
    """One measured comparison: the error beside its bound, in the output's units (or as the case says)."""

    case: str
    dtype: str
    shape: tuple[int, ...]
    error: float
    bound: float
    seconds: float

    @property
    def ratio(self) -> float:
        return ratio(self.error, self.bound)

    @property
    def within(self) -> bool:
        return self.ratio <= 1

    def document(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "error": number(self.error),
            "bound": number(self.bound),
            "ratio": number(self.ratio),
            "seconds": round(self.seconds, 6),
        }


@dataclass(frozen=True)
class Outcome:
    """A probe's result as its frame tells it; `figures` are Figure documents, ready for JSON.

    `output`: what a profile's own script printed, of much the end (`output_cut`); None for the probes that ship.
    """

    status: str
    reason: str | None = None
    failure: str | None = None
    signal: str | None = None
    at: str | None = None
    detail: str | None = None
    figures: Sequence[Mapping[str, Any]] = ()
    traits: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    output: str | None = None
    output_cut: bool = False

    def document(self, probe: str, level: str) -> dict[str, Any]:
        return {
            "kind": "probe",
            "probe": probe,
            "level": level,
            "status": self.status,
            "reason": self.reason,
            "failure": self.failure,
            "signal": self.signal,
            "at": self.at,
            "detail": self.detail,
            "figures": list(self.figures),
            "seconds": round(self.seconds, 6),
            "traits": dict(self.traits),
            "output": self.output,
            "output_cut": self.output_cut,
        }


def signal_name(number: int) -> str:
    """ "SIGFPE" for 8."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def tail(text: str, limit: int = DETAIL_LIMIT) -> str | None:
    """The last `limit` bytes of a text, which is where a traceback says what happened, from a line's beginning where
    there is one in them; None for nothing."""
    raw = text.strip().encode("utf-8", "replace")
    cut = raw[-limit:]
    if len(cut) < len(raw) and not raw[:-limit].endswith(b"\n"):
        cut = cut.partition(b"\n")[2] or cut
    return cut.decode("utf-8", "ignore") or None


def is_cut(text: str, limit: int = DETAIL_LIMIT) -> bool:
    """Whether `tail` would leave something out."""
    return len(text.strip().encode("utf-8", "replace")) > limit
