"""The result of a probe: its status (passed, failed or skipped) and its figures, the comparisons that it measured."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"

FAILURES = (
    "signal",  # a signal killed the process
    "hang",  # the process exceeded its time limit
    "oom",  # SIGKILL killed the process, or a memory allocation failed
    "wedged",  # the process could not be killed
    "exit",  # the process exited with a non-zero status
    "exception",  # the probe raised an exception
    "bound",  # an error exceeds its tolerance
    "mismatch",  # results differ that must be equal
    "nonfinite",  # a result is NaN or infinite
    "version",  # a version differs from the expected one
    "hardware",  # the driver reports a GPU fault
    "incomplete",  # the process ended without a complete result
)
DETAIL_LIMIT = 8192


class ProbeFailure(Exception):
    """Raised by a probe to fail at once. `kind` is one of FAILURES, `reason` is one sentence."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


class Skip(Exception):
    """Raised by a probe that cannot run here, to end as skipped; the message is the reason."""


def json_number(value: float) -> float | str:
    """Convert a float to a value that strict JSON allows: non-finite numbers become "nan", "inf" and "-inf"."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def ratio(error: float, bound: float) -> float:
    """Return error / bound. For a bound of zero, the ratio is 0 if the error is zero, else infinite.

    A NaN error gives NaN, which never counts as within the bound.
    """
    if bound:
        return error / bound
    return 0.0 if error == 0 else math.nan if math.isnan(error) else math.inf


@dataclass(frozen=True)
class Figure:
    """One measured comparison: an error and its bound (tolerance), usually in units of the compared output.

    `beyond_rounding`: (error - rounding) / (bound - rounding), at most over all elements, where rounding is the error
    of rounding the exact result once; None if the measured quantity is not an error. `checks`: the number of
    comparisons that this figure represents; it is the worst of them.
    """

    case: str
    dtype: str
    shape: tuple[int, ...]
    error: float
    bound: float
    beyond_rounding: float | None
    seconds: float
    checks: int = 1

    @property
    def ratio(self) -> float:
        return ratio(self.error, self.bound)

    @property
    def within(self) -> bool:
        return self.ratio <= 1

    @property
    def severity(self) -> tuple[float, float]:
        """Sort key by which the worst figure is last: `beyond_rounding`, and for equal values the ratio to the bound.

        A figure without `beyond_rounding` is sorted by its ratio.
        """
        share = self.ratio if self.beyond_rounding is None else self.beyond_rounding
        first, second = (math.inf if math.isnan(part) else part for part in (share, self.ratio))
        return first, second

    def document(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "error": json_number(self.error),
            "bound": json_number(self.bound),
            "ratio": json_number(self.ratio),
            "beyond_rounding": None if self.beyond_rounding is None else json_number(self.beyond_rounding),
            "seconds": round(self.seconds, 6),
            "checks": self.checks,
        }


def worst_of_each_dtype(figures: Sequence[Figure]) -> list[Figure]:
    """Return the most severe figure of each dtype, with the total number of checks of that dtype."""
    found: dict[str, Figure] = {}
    checks: dict[str, int] = {}
    for figure in figures:
        checks[figure.dtype] = checks.get(figure.dtype, 0) + figure.checks
        before = found.get(figure.dtype)
        if before is None or figure.severity > before.severity:
            found[figure.dtype] = figure
    return [replace(worst, checks=checks[dtype]) for dtype, worst in found.items()]


@dataclass(frozen=True)
class Outcome:
    """A probe's result, with the fields of its output line (frame_and_message_streams.py).

    `reason`: one sentence. `failure`: one of FAILURES. `signal`: the name of the signal that killed the process.
    `at`: the step that failed. `detail`: more lines about a failure. `figures`: the documents of the figures
    (Figure.document), ready for JSON. `traits`: facts that the probe reports in addition to its figures, by name.
    `output`: what the profile's script printed, or only the end of it if `output_cut`; None for built-in probes.
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


def checks(figures: Sequence[Mapping[str, Any]]) -> str:
    """Summarise figure documents, such as "3 checks, largest error beyond rounding: 8% of the tolerance".

    The summary is empty if no figure has a share. Older records have no `beyond_rounding`; for these, the ratio of the
    whole error to the tolerance is used.
    """
    known = [(figure.get("beyond_rounding", figure.get("ratio")), check_count(figure)) for figure in figures]
    shares = [share for share, _ in known if share is not None]
    if not shares:
        return ""
    total = sum(number for share, number in known if share is not None)
    count = f"{total} check{'' if total == 1 else 's'}"
    if not all(isinstance(share, (int, float)) and share <= 1 for share in shares):
        return f"{count}, an error above the tolerance"
    if all(figure.get("error") == 0 for figure in figures):
        return f"{count}, all exact"
    if max(shares) == 0:
        return f"{count}, errors of rounding only"
    return f"{count}, largest error beyond rounding: {_percent(max(shares))} of the tolerance"


def result_note(result: Mapping[str, Any]) -> str:
    """Return the note in a probe's line of the report: why the probe failed (and at which step) or was skipped, or a
    summary of its checks."""
    at = result["at"] if result["status"] == "failed" else None
    reason = result["reason"] or checks(result["figures"])
    where = f"at {at}: " if at and at not in reason else ""
    return " ".join(f"{where}{reason}".split())


def check_count(figure: Mapping[str, Any]) -> int:
    """Return how many checks a figure document represents; 1 if the document has no valid number."""
    number = figure.get("checks")
    return number if isinstance(number, int) and number > 0 else 1


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "below 1%"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as "SIGFPE" for 8."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def tail(text: str, limit: int = DETAIL_LIMIT) -> str | None:
    """Return the last `limit` bytes of a text, because a traceback ends with its error; None for an empty text.

    If the last `limit` bytes contain the beginning of a line, the result starts there.
    """
    raw = text.strip().encode("utf-8", "replace")
    cut = raw[-limit:]
    if len(cut) < len(raw) and not raw[:-limit].endswith(b"\n"):
        cut = cut.partition(b"\n")[2] or cut
    return cut.decode("utf-8", "ignore") or None


def is_cut(text: str, limit: int = DETAIL_LIMIT) -> bool:
    """Return whether `tail` shortens the text."""
    return len(text.strip().encode("utf-8", "replace")) > limit
