"""NVML's measurements of the GPUs over a period.

Only the class Gpus has side effects. It calls libcuda and NVML, but no function of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Callable

from envbuild.selftest.nvidia.nvidia_driver_query import CudaDriver
from envbuild.selftest.nvidia.nvml_ctypes import Nvml, NvmlRefused, NvmlUnavailable

DRAIN = "drain the GPU"
Numbers = Mapping[str, int]  # as returned by Nvml.numbers


@dataclass(frozen=True)
class Window:
    """The measurements of one GPU over a period: the first, the last, the lowest and the highest value of each."""

    first: Numbers
    last: Numbers
    low: Numbers
    high: Numbers

    @classmethod
    def at(cls, numbers: Numbers) -> Window:
        """Return a window that contains a single sample."""
        return cls(numbers, numbers, numbers, numbers)

    def then(self, later: Window) -> Window:
        return Window(
            first={**later.first, **self.first},
            last={**self.last, **later.last},
            low=_each(min, self.low, later.low),
            high=_each(max, self.high, later.high),
        )

    def growth(self, name: str) -> int:
        """Return by how much a count has increased in this period; 0 if the count is unknown or was reset."""
        return max(0, self.last.get(name, 0) - self.first.get(name, 0))


def _each(choose: Callable[..., int], a: Numbers, b: Numbers) -> Numbers:
    return {name: choose(numbers[name] for numbers in (a, b) if name in numbers) for name in {**a, **b}}


@dataclass(frozen=True)
class Report:
    """What was observed in a period.

    `gpus`: the window of each GPU, by PCI bus id. `xids`: the driver's Xid errors, as pairs of bus id and error number.
    `refused`: messages about NVML calls that failed because a GPU is faulty. `unwatched`: the reason why the period was
    not observed, or not completely; None if it was.
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
        """Return the report with which the next period begins. It has only the last measurements, and no errors."""
        return Report({bus_id: Window.at(window.last) for bus_id, window in self.gpus.items()})

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Report:
        gpus = {bus_id: Window(**window) for bus_id, window in document["gpus"].items()}
        return cls(gpus, document["xids"], document["refused"], document["unwatched"])


class Gpus:
    """Reads the GPUs that this process may use, through NVML. The constructor initialises the driver (cuInit).

    It raises NvmlUnavailable if libcuda or NVML cannot be used, and NvmlRefused if NVML reports a faulty GPU.
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
        """Whether NVML delivers Xid errors to this process."""
        return self._events is not None

    def numbers(self) -> dict[str, dict[str, int]]:
        """Return the current measurements of each GPU, by PCI bus id."""
        return {bus_id: self.nvml.numbers(gpu) for bus_id, gpu in self.handles.items()}

    def report(self) -> Report:
        """Return the current measurements, and the Xid errors since the last call.

        If NVML reports a faulty GPU, no exception is raised; `refused` of the report contains NVML's message.
        """
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
