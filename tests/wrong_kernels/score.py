"""How many of the wrong kernels the self-test finds, at each level: the table of benchmarks/kernel_score.py.

A kernel that is found at a level counts as found at the higher ones, whose probes and cases include the lower one's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import CodeType, FunctionType
from typing import Any

import torch._dynamo as _imported_once  # noqa: F401  a dispatch mode asks for it in each process, which takes 2 s

from envbuild.selftest.harness import probe_scheduler
from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.numerics import (
    element_comparison,
    float64_reference_operations,
    hashed_inputs,
    operation_case,
    pairwise_case_sampling,
    reference_products,
    tensor_digests,
    tolerances,
)
from envbuild.selftest.probes.probe_catalogue import PROBES

from . import WrongKernel, installed, right

LEVELS = ("quick", "standard", "full")
# Seconds after which a self-test is ended. On 2 cores, one without a wrong kernel takes 84 s at standard.
PATIENCE = {"quick": 600, "standard": 600, "full": 3600}
# Those that say nothing of a kernel's results, and the compiler's, whose kernels the installed faults do not reach.
_OTHERS = ("env.", "hw.", "init.", "perf.", "compile.", "own.", "memory", "fingerprint", "dist.nodes")
_OF_THE_MACHINE = ("hang", "oom", "wedged", "incomplete")  # a busy machine's as well
_LIKELY = {"collectives": "dist", "optimizers": "optim", "norms": "norm", "late": "repeat"}


@dataclass(frozen=True)
class Verdict:
    """The result of a self-test with a wrong kernel: the level and the probe that detected the kernel (None if no probe
    did), and the reason. `tried`: the highest level that ran."""

    kernel: str
    tried: str
    level: str | None
    probe: str | None
    reason: str | None
    seconds: float


class _Found(Exception):
    pass


def judge(kernel: WrongKernel | None, level: str, seed: int) -> Verdict:
    """Run the self-test of that level in a process of its own with the kernel installed, until a probe fails.

    Without a kernel no probe should fail. What takes longer than the level's PATIENCE is ended, and found nothing.
    """
    name, begin, patience = kernel.name if kernel else "none", time.monotonic(), PATIENCE[level]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.setsid()
        with contextlib.suppress(BaseException):
            os.write(write, json.dumps(_first_failure(kernel, level, seed)).encode())
        os._exit(0)
    os.close(write)
    answer = _read(read, begin + patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = json.loads(answer) if answer else {}
    at = level if found.get("probe") else None
    reason = found.get("reason") if answer else f"no end after {patience:g} s"
    return Verdict(name, level, at, found.get("probe"), reason, round(time.monotonic() - begin, 2))


def _first_failure(kernel: WrongKernel | None, level: str, seed: int) -> Mapping[str, Any]:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    found: dict[str, Any] = {}

    def emit(frame: Mapping[str, Any]) -> None:
        if frame.get("status") == "failed" and frame["failure"] not in _OF_THE_MACHINE:
            found.update(probe=frame["probe"], reason=str(frame["reason"])[:400])
            raise _Found

    job = JobDocument("0" * 32, level=level, seed=seed, threads=2 if kernel and asks_for_threads(kernel) else 1)
    with contextlib.suppress(_Found), installed(kernel) if kernel else contextlib.nullcontext(), right_references():
        probe_scheduler.run(ordered(kernel.operation if kernel else ""), job, emit)
    return found


@contextlib.contextmanager
def right_references() -> Iterator[None]:
    """Keep the functions that make inputs, references and comparisons right: with a fault in these functions, a fault
    could stay hidden, or be detected although no case detects it. They also make most of a probe's calls, and each call
    of torch is slow where a fault is installed."""
    modules = [module for name, module in sys.modules.items() if name.startswith("envbuild.selftest.")]
    never_wrong = (
        tolerances,
        float64_reference_operations,
        hashed_inputs,
        reference_products,
        element_comparison,
        tensor_digests,
    )
    sources = {module.__name__ for module in never_wrong}
    places: list[tuple[Any, str]] = [(operation_case.Case, "expected"), (pairwise_case_sampling, "cases")]
    for module in modules:
        places += [
            (module, name)
            for name, value in vars(module).items()
            if isinstance(value, FunctionType) and value.__module__ in sources
        ]
    before = [getattr(*place) for place in places]
    for place, function in zip(places, before, strict=True):
        setattr(*place, _right(function))
    try:
        yield
    finally:
        for place, function in zip(places, before, strict=True):
            setattr(*place, function)


def _right(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with right():
            return function(*args, **kwargs)

    @functools.wraps(function)
    def each(*args: Any, **kwargs: Any) -> Iterator[Any]:
        found, end = function(*args, **kwargs), object()
        while True:
            with right():
                item = next(found, end)
            if item is end:
                return
            yield item

    return each if inspect.isgeneratorfunction(function) else call


def asks_for_threads(kernel: WrongKernel) -> bool:
    """Return whether the fault depends on the number of threads of torch: its code, or that of a function of the same
    module that it calls, reads the number. All other faults are scored with one thread, in a quarter of the time."""
    waiting, seen = [kernel.fault], set()
    while waiting:
        function = waiting.pop()
        if (
            isinstance(function, FunctionType)
            and function.__module__.startswith("wrong_kernels")
            and function not in seen
        ):
            seen.add(function)
            names = _names(function.__code__)
            waiting += [function.__globals__[name] for name in names if name in function.__globals__]
            if "get_num_threads" in names:
                return True
    return False


def _names(code: CodeType) -> set[str]:
    """Return the names to which a function's code refers, including the code of functions inside it."""
    inner = [_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return {*code.co_names}.union(*inner)


def ordered(operation: str) -> list[Probe]:
    """Return the probes that check results, in an order that begins with the probes that are likely to detect a fault
    of this operation."""
    word = _LIKELY.get(operation, operation)
    probes = [probe for probe in PROBES if not probe.name.startswith(_OTHERS) and probe.needs == "cpu"]
    return sorted(probes, key=lambda probe: _rank(probe.name, word))


def _rank(name: str, word: str) -> tuple[bool, bool, bool]:
    return not name.startswith(word), not name.endswith(".cases"), name.startswith("dist")


def _read(fd: int, until: float) -> bytes:
    output = b""
    while (left := until - time.monotonic()) > 0:
        if not select.select([fd], [], [], left)[0]:
            break
        more = os.read(fd, 1 << 16)
        if not more:
            break
        output += more
    os.close(fd)
    return output


def lowest(kernel: WrongKernel, levels: Sequence[str], seed: int) -> Verdict:
    """The verdict of the lowest of the levels that finds the kernel; that of the last where none does."""
    for level in levels:
        verdict = judge(kernel, level, seed)
        if verdict.level:
            break
    return verdict


def line(verdict: Verdict) -> str:
    return json.dumps(asdict(verdict))


if __name__ == "__main__":
    from . import KERNELS

    package, level, names = sys.argv[1], sys.argv[2], sys.argv[3:]
    importlib.import_module(f"wrong_kernels.{package}")
    for name in names or KERNELS:
        print(line(judge(KERNELS[name], level, seed=1)), flush=True)
