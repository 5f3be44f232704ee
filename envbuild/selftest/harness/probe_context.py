"""The context that a probe's function receives: the device, the level, and methods to report steps and results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Callable

import torch

from envbuild.selftest.harness.job_document import LEVELS, JobDocument
from envbuild.selftest.harness.probe_outcome_and_figures import Figure, ratio
from envbuild.selftest.harness.script_tracebacks import FOLDER
from envbuild.selftest.numerics.element_comparison import Worst

Refusal = Callable[[Exception], bool]
_MOST_NOTES = 100  # faults that are sent to the harness immediately, so that they survive a crash of the process
_NO_KERNEL = (
    "not implemented for",  # for example fp16 on the CPU before torch 2.1
    "does not support bfloat16",  # autocast below compute capability 8.0, before torch 2.4
    "No valid engine configs",  # cuDNN: no engine for this graph on this GPU (NVIDIA/cudnn-frontend#120)
)
_SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def short_name(dtype: torch.dtype) -> str:
    """Short name of a dtype, as used in step names: bf16 for torch.bfloat16."""
    name = dtype_name(dtype)
    return _SHORT.get(name, name)


@dataclass(frozen=True)
class ProbeFault:
    """A fault that a probe found: its kind (one of probe_outcome_and_figures.FAILURES), the step, and a sentence.

    `signal`: the name of the signal that killed a process started by the probe.
    """

    kind: str
    step: str | None
    reason: str
    signal: str | None = None


class ProbeStep:
    """One announced step. After it ends, `seconds` holds its duration, including the work on the device.

    `refused`: torch reported in this step that it has no such kernel, and the probe allows that; the error ended only
    the step.
    """

    def __init__(self, device: torch.device, leave_out: Callable[[BaseException | None], bool]) -> None:
        self.seconds = 0.0
        self.refused = False
        self._device = device
        self._leave_out = leave_out
        self._begin = 0.0

    def __enter__(self) -> ProbeStep:
        self._begin = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds = time.perf_counter() - self._begin
        self.refused = self._leave_out(error)
        return self.refused


class Context:
    """The interface between a probe and the harness. It exists only in the probe's own process."""

    def __init__(
        self,
        job: JobDocument,
        announce: Callable[[str], None] = lambda step: None,
        environment: Callable[[Mapping[str, Any]], None] = lambda document: None,
        fingerprint: Callable[[Mapping[str, Any]], None] = lambda document: None,
        note: Callable[[str], None] = lambda reason: None,
        folders: str = FOLDER,
    ) -> None:
        self.job = job
        self.folders = folders  # prefix of the names of temporary folders
        self.device = torch.device(job.device)
        self.figures: list[Figure] = []
        self.faults: list[ProbeFault] = []
        self.traits: dict[str, Any] = {}
        self.at: str | None = None
        self.default_flags: dict[str, bool] = {}  # of torch.backends.cuda.matmul: the defaults of this torch
        self.send_environment = environment
        self.send_fingerprint = fingerprint
        self._announce = announce
        self._note = note

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def at_least(self, level: str) -> bool:
        return LEVELS.index(self.job.level) >= LEVELS.index(level)

    def step(self, name: str, may_refuse: Refusal | None = None) -> ProbeStep:
        """Announce a step before it begins, so that the step is known if the process dies; `with` times it.

        Work still queued on the device is finished first, so that its time and its faults count for the previous step.
        If `may_refuse` recognises an error as a missing kernel, the error ends the `with` block and is recorded in the
        traits.
        """
        if not self.on_cpu and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self.device)
        self.at = name
        self._announce(name)

        def leave_out(error: BaseException | None) -> bool:
            if may_refuse is None or not isinstance(error, (RuntimeError, TypeError)) or not may_refuse(error):
                return False
            self.unsupported(error)
            return True

        return ProbeStep(self.device, leave_out)

    @contextlib.contextmanager
    def with_default_flags(self) -> Iterator[None]:
        """Use torch's default precision flags for products, for results that are reported but not judged."""
        flags = torch.backends.cuda.matmul
        declared = {name: getattr(flags, name) for name in self.default_flags}
        try:
            for name, value in self.default_flags.items():
                setattr(flags, name, value)
            yield
        finally:
            for name, value in declared.items():
                setattr(flags, name, value)

    def fail(self, kind: str, reason: str, signal: str | None = None) -> None:
        """Record a fault and continue: the probe fails, and its later cases are still measured."""
        self.faults.append(ProbeFault(kind, self.at, reason, signal))
        if len(self.faults) <= _MOST_NOTES:
            self._note(reason)

    def figure(
        self,
        case: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        error: float,
        bound: float,
        seconds: float,
    ) -> Figure:
        """Record a measured comparison without rounding; the caller judges it."""
        share = ratio(float(error), float(bound))
        figure = Figure(case, dtype_name(dtype), tuple(shape), float(error), float(bound), share, seconds)
        self.figures.append(figure)
        return figure

    def compared(self, case: str, dtype: torch.dtype, shape: Sequence[int], worst: Worst, seconds: float) -> Figure:
        """Record a comparison with a reference; the caller judges it."""
        share = worst.beyond_rounding
        figure = Figure(case, dtype_name(dtype), tuple(shape), worst.error, worst.bound, share, seconds)
        self.figures.append(figure)
        return figure

    def unsupported(self, error: BaseException) -> None:
        """Record in the traits that this torch has no kernel for the current step, so that no step is left out
        silently.
        """
        self.traits.setdefault("unsupported", {})[str(self.at)] = str(error).strip().splitlines()[0][:200]


def missing_gpu() -> str | None:
    """The reason why this process has no GPU; None if it has one. This check starts CUDA."""
    if torch.cuda.is_available():
        return None
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"no GPU is visible to torch {torch.__version__} (built with {built})"


def is_unsupported(error: Exception) -> bool:
    """Whether the error is torch's or cuDNN's report that the device has no kernel for an operation."""
    return isinstance(error, NotImplementedError) or any(words in str(error) for words in _NO_KERNEL)
