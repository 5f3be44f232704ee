"""Adds NVML's measurements to the outcome of the probe that ran in the measured period.

A hardware fault makes the probe fail. All other measurements become traits of the outcome.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from envbuild.selftest.harness.probe_outcome_and_figures import FAILED, Outcome, tail
from envbuild.selftest.nvidia.gpu_telemetry import DRAIN, Report, Window
from envbuild.selftest.nvidia.nvml_ctypes import NVLINK

# Numbers of Xid errors that applications cause, possibly a process other than the probe. NVIDIA/k8s-device-plugin also
# keeps a GPU in use after these errors (its issue #1340 and pull request #1165).
APPLICATION_XIDS = frozenset((13, 31, 43, 45, 68, 109))

# Measurements whose increase shows that a GPU must not be used, with the message for each.
_FAULTS = {
    "uncorrected": "{} uncorrected memory errors {}: " + DRAIN + " and reset it",
    "pending": "faulty memory is waiting to be replaced: " + DRAIN + " and reset it",
    "failed": "faulty memory could not be replaced: " + DRAIN + " permanently",
}
_COUNTS = ("corrected", "uncorrected", "remapped", "pcie_replays", *NVLINK)
_MEASURED = ("celsius", "milliwatts", "sm_mhz", "memory_mhz", "free_mib")
_LIMITED = "limited: "
_IDLE = _LIMITED + "idle"
_PCIE = ("pcie_generation", "pcie_width")


def telemetry_faults(window: Window, when: str) -> Iterator[str]:
    """Yield a message for each fault that appeared in this window and because of which the GPU must not be used.

    `when` describes the period in the message, such as "during the probe".
    """
    for name, sentence in _FAULTS.items():
        if window.growth(name):
            yield sentence.format(window.growth(name), when)


def attribute(outcome: Outcome, report: Report) -> Outcome:
    """Return the probe's outcome with NVML's report: a hardware fault makes it "failed", other data becomes traits."""
    traits = {**outcome.traits, **_traits(report)}
    found = [
        *report.refused,
        *(
            f"GPU {gpu}: {fault}"
            for gpu, window in report.gpus.items()
            for fault in telemetry_faults(window, "during the probe")
        ),
        *(
            f"GPU {gpu}: the driver reported Xid {number} during the probe: see the host's log, and {DRAIN}"
            for gpu, number in report.xids
            if number not in APPLICATION_XIDS
        ),
    ]
    if not found:
        return replace(outcome, traits=traits)
    own = filter(None, (*found[1:], outcome.reason, outcome.detail))
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return replace(
        outcome, status=FAILED, failure="hardware", reason=found[0] + more, detail=tail("\n".join(own)), traits=traits
    )


def _traits(report: Report) -> dict[str, Any]:
    traits: dict[str, Any] = {"nvml": {gpu: _summary(window) for gpu, window in report.gpus.items()}}
    application = [number for _, number in report.xids if number in APPLICATION_XIDS]
    if application:
        traits["application_xids"] = application
    if report.unwatched:
        traits["unwatched"] = report.unwatched
    return traits


def _summary(window: Window) -> dict[str, Any]:
    """Summarise a window: the range of each measurement, the clock limits, and the counts that increased.

    The PCIe link is included if it was always narrower or slower than its maximum, and the GPU was not always idle. (An
    idle GPU slows its link down.)
    """
    low, high = window.low, window.high
    summary: dict[str, Any] = {name: [low[name], high[name]] for name in _MEASURED if name in low}
    limits = [name[len(_LIMITED) :] for name, met in high.items() if name.startswith(_LIMITED) and met]
    summary["limited"] = [name for name in limits if name != "idle"]
    summary["grew"] = {name: window.growth(name) for name in _COUNTS if window.growth(name)}
    if low.get(_IDLE) == 0 and any(high.get(name, 0) < high.get(f"{name}_most", 0) for name in _PCIE if name in high):
        summary["pcie_below_most"] = {name: [high.get(name), high.get(f"{name}_most")] for name in _PCIE}
    return summary
