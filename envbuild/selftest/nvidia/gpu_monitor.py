"""Monitors the GPUs through NVML during the whole run.

The monitor is a separate process, so that no probe inherits NVML's handle or waits for NVML. It initialises the driver
(cuInit) to determine which GPUs it may use, but creates no CUDA context.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Sequence
from typing import NoReturn

from envbuild.selftest.harness.frame_and_message_streams import write_all
from envbuild.selftest.harness.probe_outcome_and_figures import signal_name
from envbuild.selftest.nvidia.gpu_telemetry import DRAIN, Gpus, Report
from envbuild.selftest.nvidia.nvml_ctypes import NvmlRefused, NvmlUnavailable

PERIOD = 0.25  # seconds between samples of the GPUs; for every report, an additional sample is taken
# Time limits in seconds for a report. START is for the first report, which waits until the driver has started; that
# takes longer with more GPUs. ANSWER is for all further reports.
START, ANSWER = 60.0, 5.0
DEATH = 1.0  # seconds to wait for the end of the killed process; a process blocked in the driver is abandoned
_CHUNK = 1 << 16


class Monitor:
    """The monitor process and the harness's ends of its pipes.

    `hidden`: descriptors of the harness that are closed in the monitor process. `descriptors`: the harness's ends of
    the pipes, which must be closed in all other child processes.
    """

    def __init__(self, hidden: Sequence[int] = ()) -> None:
        self._unwatched: str | None = None
        self._patience = START
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self.descriptors = (self._requests, self._answers)
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _main(requests, answers, (*self.descriptors, *hidden))
        except OSError as error:
            self._pid, self._unwatched = 0, f"no process could be started: {error}"
        finally:
            os.close(requests)
            os.close(answers)

    def report(self) -> Report:
        """Return what the monitor has observed since the last report.

        If the monitor process has ended or does not respond, this report and all later ones contain only the reason.
        """
        if self._unwatched is None:
            try:
                with contextlib.suppress(BrokenPipeError):  # if the process has ended, _line() raises OSError
                    os.write(self._requests, b"?")
                report = Report.of(json.loads(self._line()))
                self._unwatched = report.unwatched
                return report
            except (OSError, ValueError) as error:
                self._unwatched = f"NVML's monitor: {error}"
                self._kill()
        return Report(unwatched=self._unwatched)

    def end(self) -> None:
        """Kill the monitor process and close the pipes to it."""
        self._kill()
        self._close()

    def _line(self) -> bytes:
        limit, self._patience = self._patience, ANSWER
        deadline, line = time.monotonic() + limit, b""
        while not line.endswith(b"\n"):
            if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise OSError(f"no answer after {limit:g} s")
            data = os.read(self._answers, _CHUNK)
            if not data:
                raise OSError(self._death())
            line += data
        return line

    def _death(self) -> str:
        status = self._reap()
        died = status is not None and os.WIFSIGNALED(status)
        return f"died of {signal_name(os.WTERMSIG(status or 0))}" if died else f"ended with wait status {status}"

    def _kill(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._reap()

    def _reap(self) -> int | None:
        """Wait for the end of the process and return its wait status; None if it does not end within DEATH seconds.

        In both cases, the process is not waited for again.
        """
        deadline, pid, status = time.monotonic() + DEATH, 0, 0
        while not pid and time.monotonic() < deadline:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            time.sleep(0 if pid else 0.005)
        self._pid = 0
        return status if pid else None

    def _close(self) -> None:
        for fd in self.descriptors:
            os.close(fd)


def _main(requests: int, answers: int, not_ours: Sequence[int]) -> NoReturn:
    """Run the monitor in the forked process, and exit without Python's shutdown.

    The monitor also exits when the harness has ended. Only the harness has the other end of the pipe `requests`, so a
    read from this pipe then returns end of file.
    """
    try:
        for fd in not_ours:
            os.close(fd)
        os.setsid()  # in a new session, the terminal's Ctrl-C reaches only the harness, which then ends the monitor
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        with contextlib.suppress(OSError):
            _serve(requests, answers)
    finally:
        os._exit(0)


def _serve(requests: int, answers: int) -> None:
    """Sample the GPUs every PERIOD seconds, and answer each received byte with a report since the last answer."""
    unwatched, gpus = None, None
    try:
        gpus = Gpus()
    except NvmlUnavailable as error:
        unwatched = str(error)
    except NvmlRefused as error:
        unwatched = f"{error}: {DRAIN}"
    seen = Report(unwatched=unwatched)
    while True:
        asked = select.select([requests], [], [], PERIOD if gpus else None)[0]
        if asked and not os.read(requests, 1):
            return
        seen = seen.then(gpus.report()) if gpus else seen
        if asked:
            write_all(answers, json.dumps(seen.document()).encode("ascii") + b"\n")
            seen = seen.since()
