"""What NVML's measurements mean for the probe that ran during them. Hardware faults fail it, the rest are traits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from envbuild.selftest.harness.probe_outcome_and_figures import FAILED, Outcome, tail
from envbuild.selftest.nvidia.gpu_telemetry import DRAIN, Report, Window
from envbuild.selftest.nvidia.nvml_ctypes import NVLINK

# Xid errors caused by applications, possibly by another process: NVIDIA/k8s-device-plugin leaves a GPU in use after
# them (its issue #1340 and pull request #1165).
APPLICATION_XIDS = frozenset((13, 31, 43, 45, 68, 109))

# Counts whose growth makes a GPU unfit, with the message for each.
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
    """Faults that appeared in this window and make a GPU unfit; `when` describes the period in the message."""
    for name, sentence in _FAULTS.items():
        if window.growth(name):
            yield sentence.format(window.growth(name), when)


def attribute(outcome: Outcome, report: Report) -> Outcome:
    """Add the driver's reports to a probe's outcome: any hardware fault fails it, other data goes into its traits."""
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
    """Summarise a window: the range of each measurement, clock limits, counts that grew, and a degraded PCIe link.

    The PCIe link is included if it was narrower or slower than its maximum while the GPU worked (an idle GPU slows its
    link down).
    """
    low, high = window.low, window.high
    summary: dict[str, Any] = {name: [low[name], high[name]] for name in _MEASURED if name in low}
    limits = [name[len(_LIMITED) :] for name, met in high.items() if name.startswith(_LIMITED) and met]
    summary["limited"] = [name for name in limits if name != "idle"]
    summary["grew"] = {name: window.growth(name) for name in _COUNTS if window.growth(name)}
    if low.get(_IDLE) == 0 and any(high.get(name, 0) < high.get(f"{name}_most", 0) for name in _PCIE if name in high):
        summary["pcie_below_most"] = {name: [high.get(name), high.get(f"{name}_most")] for name in _PCIE}
    return summary
