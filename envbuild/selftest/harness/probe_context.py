"""The context that a probe's function receives: the job, the device, and methods to report steps and results."""

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
_MOST_NOTES = 100  # faults sent to the harness at once, so that a crash of the process does not lose them
_NO_KERNEL = (
    "not implemented for",  # for example fp16 on the CPU before torch 2.1
    "does not support bfloat16",  # autocast below compute capability 8.0, before torch 2.4
    "No valid engine configs",  # cuDNN has no engine for this graph on this GPU (NVIDIA/cudnn-frontend#120)
)
_SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def short_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype that step names use, such as bf16 for torch.bfloat16."""
    name = dtype_name(dtype)
    return _SHORT.get(name, name)


@dataclass(frozen=True)
class ProbeFault:
    """A fault that a probe found.

    `kind`: one of probe_outcome_and_figures.FAILURES. `step`: the name of the step in which the probe found the fault.
    `reason`: one sentence. `signal`: the name of the signal that killed a process started by the probe, if any.
    """

    kind: str
    step: str | None
    reason: str
    signal: str | None = None


class ProbeStep:
    """Context manager for one step of a probe. After the step, `seconds` is its duration, including work on the device.

    `refused`: whether the step ended early because torch reported a missing kernel, and the probe allows that.
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
    """The interface between a probe and the harness, used in the probe's process.

    `traits`: facts that the probe reports in addition to its comparisons, by name.
    """

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
        self.folders = folders  # prefix for the names of temporary folders that the probe creates
        self.device = torch.device(job.device)
        self.figures: list[Figure] = []
        self.faults: list[ProbeFault] = []
        self.traits: dict[str, Any] = {}
        self.at: str | None = None
        self.default_flags: dict[str, bool] = {}  # this torch's default values of flags of torch.backends.cuda.matmul
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
        """Announce a step and return a context manager that times it.

        The step is announced before it begins, so that the harness knows the step if the process dies. Before that,
        this method waits for work that is queued on the device, so that the work's time and faults count for the
        previous step. If `may_refuse` recognises an error of the step as a missing kernel, the error ends only the
        `with` block and is recorded in the traits.
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
        """Use torch's default precision flags for matrix products. Results in this context are only reported."""
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
        """Record a fault without ending the probe: the probe fails in the end, but its later cases still run."""
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
        """Record a comparison whose result is not rounded; the caller judges the error."""
        share = ratio(float(error), float(bound))
        figure = Figure(case, dtype_name(dtype), tuple(shape), float(error), float(bound), share, seconds)
        self.figures.append(figure)
        return figure

    def compared(self, case: str, dtype: torch.dtype, shape: Sequence[int], worst: Worst, seconds: float) -> Figure:
        """Record the worst element of a comparison with a reference; the caller judges the error."""
        share = worst.beyond_rounding
        figure = Figure(case, dtype_name(dtype), tuple(shape), worst.error, worst.bound, share, seconds)
        self.figures.append(figure)
        return figure

    def unsupported(self, error: BaseException) -> None:
        """Record in the traits that no kernel exists for the current step. Thus the report names every omitted step."""
        self.traits.setdefault("unsupported", {})[str(self.at)] = str(error).strip().splitlines()[0][:200]


def missing_gpu() -> str | None:
    """Return the reason why this process has no GPU; None if it has one. This check starts CUDA."""
    if torch.cuda.is_available():
        return None
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"no GPU is visible to torch {torch.__version__} (built with {built})"


def is_unsupported(error: Exception) -> bool:
    """Return whether the error is torch's or cuDNN's report that no kernel exists for an operation."""
    return isinstance(error, NotImplementedError) or any(words in str(error) for words in _NO_KERNEL)
