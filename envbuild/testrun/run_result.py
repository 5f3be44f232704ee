"""Types for the result of a test run: a runner's raw output, and the judged run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from envbuild.facts import database, probe_catalogue_reader

_SUBJECT = ("python", "torch", "device", "level", "threads", "seed")
MAX_STDOUT = 64 << 20  # limit in bytes for a runner


@dataclass(frozen=True)
class RawOutput:
    """The raw output of a run. `exit_code`: None if it did not end by itself. `where`: where it ran, empty for this
    machine. `parts`: for several nodes, the exit code of each and the number of bytes of its stdout, which follow one
    another."""

    stdout: bytes
    stderr: str
    exit_code: int | None
    seconds: float
    out_of_memory: bool = False
    timed_out: bool = False
    too_long: bool = False
    parts: tuple[tuple[int, int], ...] = ()
    where: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TestRun:
    """A judged run. `errors` are faults of the run itself: with any of them, nothing in the run counts as passed.

    `skipped_required`: required probes that could not run here; the run did not fail, but is not valid evidence either.
    """

    results: tuple[Mapping[str, Any], ...]
    environment: Mapping[str, Any]
    start: Mapping[str, Any]
    errors: tuple[str, ...]
    seconds: float
    skipped_required: tuple[str, ...] = ()
    log: str = field(default="", compare=False)
    fingerprint: Mapping[str, Any] = field(default_factory=dict)  # as received, not judged; empty if not requested
    where: Mapping[str, Any] = field(default_factory=dict)  # as reported by the runner
    short: bool = False  # the container was killed because it ran out of memory

    def by_status(self, status: str) -> list[str]:
        return [result["probe"] for result in self.results if result["status"] == status]

    @property
    def passed(self) -> bool:
        """True if nothing failed and at least one probe passed."""
        return not self.errors and bool(self.by_status("passed")) and not self.by_status("failed")

    @property
    def out_of_memory(self) -> bool:
        """Whether a probe or the container was killed because it ran out of memory, as far as this can be detected."""
        return self.short or any(result.get("failure") == "oom" for result in self.results)

    @property
    def subject(self) -> dict[str, str]:
        """Return where the self-test ran, as it reported itself: the keys in _SUBJECT."""
        return {key: str(self.start[key])[:100] for key in _SUBJECT if key in self.start}

    def leaving_out(self, reasons: Mapping[str, str]) -> TestRun:
        """Return the same run with additional skipped probes that were not planned, with the given reasons."""
        return replace(self, results=(*self.results, *(_skipped(name, reason) for name, reason in reasons.items())))

    def failures(self) -> list[dict[str, Any]]:
        """Return {"probe", "signal", "advisory", "detail"} for each failed probe, and for each fault of the run."""
        found = [_failure(result) for result in self.results if result["status"] == "failed"]
        found += [{"probe": None, "signal": None, "advisory": None, "detail": text} for text in self.errors]
        return found

    def summary(self) -> dict[str, Any]:
        counts = {status: len(self.by_status(status)) for status in ("passed", "failed", "skipped")}
        if self.errors:
            counts["passed"] = 0
        return {**counts, "seconds": round(self.seconds, 2), "failures": self.failures()}


def _skipped(probe: str, reason: str) -> dict[str, Any]:
    nothing = dict.fromkeys(("failure", "signal", "at", "detail", "output"))
    level = probe_catalogue_reader.known_probes()[probe].level
    return {"probe": probe, "level": level, "status": "skipped", "reason": reason, **nothing, "output_cut": False,
            "figures": [], "seconds": 0.0, "traits": {}}  # fmt: skip


def _failure(result: Mapping[str, Any]) -> dict[str, Any]:
    advisory = next((advisory for advisory in database.advisories() if advisory.matches(result)), None)
    where = f" at {result['at']}" if result["at"] else ""
    return {
        "probe": result["probe"],
        "signal": result["signal"],
        "advisory": advisory.id if advisory else None,
        "detail": f"{result['failure']}{where}: {result['reason']}",
    }
