"""The code that runs in a probe's own process, from the fork to the exit."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from envbuild.selftest.harness.forked_work import limit_memory
from envbuild.selftest.harness.frame_and_message_streams import (
    ANNOUNCE,
    ENVIRONMENT,
    FINGERPRINT,
    NOTE,
    RESULT,
    encode_document,
    pack,
    write_all,
)
from envbuild.selftest.harness.job_document import SETTINGS, JobDocument
from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context, missing_gpu
from envbuild.selftest.harness.probe_outcome_and_figures import (
    FAILED,
    PASSED,
    SKIPPED,
    Outcome,
    ProbeFailure,
    Skip,
    tail,
)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BLOCK, _KEPT_FREE = 32 << 20, 512 << 20  # bytes


@dataclass(frozen=True)
class Ends:
    """The child's ends of its pipes.

    The child writes its messages to `messages`, faulthandler's stacks to `dump`, and stdout and stderr to `noise`. From
    `go`, the child reads one byte when the probe may run, or end of file if the harness has ended.
    `folders`: the prefix for the names of the probe's temporary folders, which the harness removes after the probe.
    """

    messages: int
    dump: int
    noise: int
    go: int
    folders: str


def main(probe: Probe, job: JobDocument, ends: Ends, not_ours: Sequence[int] = ()) -> NoReturn:
    """Start CUDA if the probe allows that, wait until the probe may run, run it and exit.

    `not_ours`: the harness's descriptors, which are closed here. The process exits without Python's shutdown, which
    could crash or hang after the result is known.
    """
    status = 70
    try:
        for fd in not_ours:
            os.close(fd)
        _settle(ends)
        _limit_memory(job)
        _keep_freed_memory()
        if job.device == "cuda" and probe.may_start_ahead:
            with contextlib.suppress(Exception):  # the same error occurs again in the probe, which reports it
                torch.cuda.synchronize()
        if os.read(ends.go, 1):
            result = _result(probe, job, ends)
            write_all(ends.messages, pack(RESULT, encode_document(result)))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def _settle(ends: Ends) -> None:
    """Prepare the forked process: start a new session, restore the default signal handlers, redirect the streams.

    The new session lets the harness kill the whole process group. Because stdout and stderr are redirected, no output
    of a probe reaches the harness's stdout.
    """
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(ends.noise, 1)
    os.dup2(ends.noise, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(file=ends.dump, all_threads=True)


def _limit_memory(job: JobDocument) -> None:
    """Limit the memory that the process may add to `memory_mb` MiB.

    With CUDA no limit is set, because CUDA reserves more address space than it uses.
    """
    if job.memory_mb is None or job.device == "cuda":
        return
    limit_memory(job.memory_mb << 20)


def _keep_freed_memory() -> None:
    """Let malloc keep freed blocks of up to 32 MiB (the largest allowed threshold) instead of returning them.

    The kernel fills a returned page with zeros before a process gets it again. That took a sixth of the CPU time of the
    probes with sampled cases.
    """
    with contextlib.suppress(AttributeError):  # a C library without mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_FREE)


def _prepare(context: Context) -> None:
    """Set every precision flag explicitly, so that the tests do not depend on the defaults of a torch version."""
    job, flags = context.job, torch.backends.cuda.matmul
    # With a GPU, the host only computes references. Their operations are too short for several threads: with two
    # threads, they took 1.4 times the CPU time (measured).
    torch.set_num_threads(job.thread_count if context.on_cpu else 1)
    for name in SETTINGS:
        with contextlib.suppress(AttributeError, AssertionError):  # AssertionError: torch 2.0 has no such flag
            context.default_flags[name] = getattr(flags, name)
        if name in job.settings or name in context.default_flags:  # raises if a requested flag does not exist
            setattr(flags, name, job.settings.get(name, False))
    torch.backends.cudnn.allow_tf32 = job.allow_tf32
    missing = missing_gpu() if job.device == "cuda" else None
    if missing:
        raise Skip(missing)


def _need_capability(context: Context, least: tuple[int, int]) -> None:
    """Raise Skip if the GPU's compute capability is below `least`."""
    if context.on_cpu or least == (0, 0):
        return
    found = torch.cuda.get_device_capability()
    if found < least:
        raise Skip("needs compute capability {}.{} or higher, this GPU has {}.{}".format(*least, *found))


def _result(probe: Probe, job: JobDocument, ends: Ends) -> dict[str, Any]:
    context = Context(
        job,
        announce=lambda step: write_all(ends.messages, pack(ANNOUNCE, step.encode("utf-8"))),
        environment=lambda document: write_all(ends.messages, pack(ENVIRONMENT, encode_document(document))),
        fingerprint=lambda document: write_all(ends.messages, pack(FINGERPRINT, encode_document(document))),
        note=lambda reason: write_all(ends.messages, pack(NOTE, reason.encode("utf-8", "replace"))),
        folders=ends.folders,
    )
    begin = time.perf_counter()
    outcome = _attempt(probe, job, context)
    return dict(outcome.document(probe.name, probe.level), seconds=time.perf_counter() - begin)


def _attempt(probe: Probe, job: JobDocument, context: Context) -> Outcome:
    last = ""
    try:
        if probe.needs != "script":
            warnings.simplefilter("ignore")  # torch warns about each missing kernel; the outcome lists these already
        if not probe.untouched:
            _prepare(context)
            _need_capability(context, probe.least_capability)
        probe.function(context)
    except Skip as skip:
        if not context.faults:  # with faults recorded before the skip, the probe fails
            return _outcome(context, SKIPPED, reason=str(skip))
        last = f"the rest is skipped: {skip}"
    except ProbeFailure as failure:
        return _outcome(context, FAILED, failure.kind, failure.reason, _noted(context))
    except SystemExit as error:
        return _outcome(context, FAILED, "exit", f"the probe called exit({error.code})", _noted(context, _trace()))
    except BaseException as error:
        kind = "oom" if _is_memory(error) else "exception"
        return _outcome(context, FAILED, kind, _sentence(error), _noted(context, _trace()))
    if not context.faults:
        return _outcome(context, PASSED)
    first, more = context.faults[0], len(context.faults) - 1
    context.at = first.step
    reason = first.reason + (f" (and {more} more)" if more else "")
    return _outcome(context, FAILED, first.kind, reason, _noted(context, last), first.signal)


def _noted(context: Context, last: str = "") -> str:
    """Return the faults that the probe recorded, one a line, followed by the text `last` about how the probe ended."""
    return "\n".join([*(fault.reason for fault in context.faults), last])


def _outcome(
    context: Context,
    status: str,
    failure: str | None = None,
    reason: str | None = None,
    detail: str | None = None,
    signal_: str | None = None,
) -> Outcome:
    return Outcome(
        status=status,
        reason=reason,
        failure=failure,
        signal=signal_,
        at=context.at if status == FAILED else None,
        detail=tail(detail or ""),
        figures=[figure.document() for figure in context.figures],
        traits=context.traits,
    )


def _is_memory(error: BaseException) -> bool:
    """Return whether the error is a failed memory allocation of Python, of CUDA or of torch's CPU allocator."""
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return "{}: {}".format(type(error).__name__, lines[0][:2000] if lines else "no message")


def _trace() -> str:
    return traceback.format_exc()
