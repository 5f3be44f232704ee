"""What NVML reports of the GPUs over a stretch of time, and what that means for the probe that ran meanwhile.

Only Gpus has effects; it calls libcuda and NVML, and nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Callable

from envbuild.selftest.harness.probe_outcome_and_figures import FAILED, Outcome, tail
from envbuild.selftest.nvidia.libcuda import CudaDriver
from envbuild.selftest.nvidia.nvml_ctypes import NVLINK, Nvml, NvmlRefused, NvmlUnavailable

DRAIN = "drain the GPU"
# Xid errors that an application causes, maybe another process's: NVIDIA/k8s-device-plugin leaves a GPU in use after
# them (its issue #1340 and pull request #1165).
APPLICATION_XIDS = frozenset((13, 31, 43, 45, 68, 109))

Numbers = Mapping[str, int]  # as Nvml.numbers gives them

# The counts whose growth makes a GPU unfit, and the sentence for each.
_FAULTS = {
    "uncorrected": "{} uncorrected memory errors {}: " + DRAIN + " and reset it",
    "pending": "memory that went bad waits to be replaced: " + DRAIN + " and reset it",
    "failed": "memory that went bad could not be replaced: " + DRAIN + " for good",
}
_COUNTS = ("corrected", "uncorrected", "remapped", "pcie_replays", *NVLINK)
_MEASURED = ("celsius", "milliwatts", "sm_mhz", "memory_mhz", "free_mib")
_LIMITED = "limited: "
_IDLE = _LIMITED + "idle"
_PCIE = ("pcie_generation", "pcie_width")


@dataclass(frozen=True)
class Window:
    """One GPU's numbers over a time: the first and the last known of each, the lowest and the highest."""

    first: Numbers
    last: Numbers
    low: Numbers
    high: Numbers

    @classmethod
    def at(cls, numbers: Numbers) -> Window:
        """A single moment."""
        return cls(numbers, numbers, numbers, numbers)

    def then(self, later: Window) -> Window:
        return Window(
            first={**later.first, **self.first},
            last={**self.last, **later.last},
            low=_each(min, self.low, later.low),
            high=_each(max, self.high, later.high),
        )

    def growth(self, name: str) -> int:
        """How much a count has grown; 0 where it is unknown, or was set back."""
        return max(0, self.last.get(name, 0) - self.first.get(name, 0))


def _each(choose: Callable[..., int], a: Numbers, b: Numbers) -> Numbers:
    return {name: choose(numbers[name] for numbers in (a, b) if name in numbers) for name in {**a, **b}}


@dataclass(frozen=True)
class Report:
    """What was seen over a time: of each GPU, by its PCI bus id; the Xid errors, each with its GPU's bus id; what NVML
    refused because a GPU is faulty. `unwatched`: why nothing was seen, or not to the end.
    """

    gpus: Mapping[str, Window] = field(default_factory=dict)
    xids: Sequence[Sequence[Any]] = ()
    refused: Sequence[str] = ()
    unwatched: str | None = None

    def then(self, later: Report) -> Report:
        both = {bus_id: window.then(later.gpus[bus_id]) for bus_id, window in self.gpus.items() if bus_id in later.gpus}
        return Report(
            gpus={**self.gpus, **later.gpus, **both},
            xids=[*self.xids, *later.xids],
            refused=list(dict.fromkeys([*self.refused, *later.refused])),
            unwatched=later.unwatched or self.unwatched,
        )

    def since(self) -> Report:
        """The time after this one, so far: the last numbers, and no event."""
        return Report({bus_id: Window.at(window.last) for bus_id, window in self.gpus.items()})

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Report:
        gpus = {bus_id: Window(**window) for bus_id, window in document["gpus"].items()}
        return cls(gpus, document["xids"], document["refused"], document["unwatched"])


class Gpus:
    """The GPUs that this process may use, as NVML reports them. Starts the driver.

    Raises Unavailable where libcuda or NVML cannot be asked, Refused where NVML reports a faulty GPU.
    """

    def __init__(self) -> None:
        self.nvml = Nvml()
        try:
            driver = CudaDriver()
        except OSError as error:
            raise NvmlUnavailable(str(error)) from None
        if driver.start() != 0:
            raise NvmlUnavailable("the driver does not start")
        found = {bus_id: self.nvml.handle(bus_id) for bus_id in driver.bus_ids()}
        self.handles = {bus_id: gpu for bus_id, gpu in found.items() if gpu is not None}
        self._events = self.nvml.watch(list(self.handles.values())) if self.handles else None

    @property
    def has_events(self) -> bool:
        """Whether the driver reports Xid errors here."""
        return self._events is not None

    def numbers(self) -> dict[str, dict[str, int]]:
        """Of each GPU now, by its PCI bus id."""
        return {bus_id: self.nvml.numbers(gpu) for bus_id, gpu in self.handles.items()}

    def report(self) -> Report:
        """This moment, and the Xid errors since the last call. A faulty GPU is reported, not raised."""
        gpus, refused, xids = {}, [], []
        for bus_id, gpu in self.handles.items():
            try:
                gpus[bus_id] = Window.at(self.nvml.numbers(gpu))
            except NvmlRefused as error:
                refused.append(f"GPU {bus_id}: {error}: {DRAIN}")
        try:
            xids = [] if self._events is None else self.nvml.xids(self._events)
        except NvmlRefused as error:
            refused.append(f"{error}: {DRAIN}")
        names = {gpu.value: bus_id for bus_id, gpu in self.handles.items()}
        return Report(gpus, [(names.get(gpu, "unknown"), number) for gpu, number in xids], refused)


def telemetry_faults(window: Window, when: str) -> Iterator[str]:
    """What makes a GPU unfit, of what came about in a time; `when`, in words."""
    for name, sentence in _FAULTS.items():
        if window.growth(name):
            yield sentence.format(window.growth(name), when)


def attribute(outcome: Outcome, report: Report) -> Outcome:
    """A probe's outcome with what the driver reported while it ran: any fault of the hardware fails it, whatever it
    found itself, and the rest is added to its traits."""
    traits = {**outcome.traits, **_traits(report)}
    found = [
        *report.refused,
        *(
            f"GPU {gpu}: {fault}"
            for gpu, window in report.gpus.items()
            for fault in telemetry_faults(window, "meanwhile")
        ),
        *(
            f"GPU {gpu}: the driver reported Xid {number} meanwhile: see the host's log, and {DRAIN}"
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
    """A GPU's lowest and highest of what is measured, what limited its clocks, which counts grew, and its PCIe link
    where that was narrower or slower than it can be although the GPU worked (an idle GPU slows its link down)."""
    low, high = window.low, window.high
    summary: dict[str, Any] = {name: [low[name], high[name]] for name in _MEASURED if name in low}
    limits = [name[len(_LIMITED) :] for name, met in high.items() if name.startswith(_LIMITED) and met]
    summary["limited"] = [name for name in limits if name != "idle"]
    summary["grew"] = {name: window.growth(name) for name in _COUNTS if window.growth(name)}
    if low.get(_IDLE) == 0 and any(high.get(name, 0) < high.get(f"{name}_most", 0) for name in _PCIE if name in high):
        summary["pcie_below_most"] = {name: [high.get(name), high.get(f"{name}_most")] for name in _PCIE}
    return summary
