"""Probes that fail in every way in which a process can fail, by real faults, and some that pass or are skipped."""

import ctypes
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from envbuild.selftest.harness import probe_process
from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import ProbeFailure, Skip

NOISE = 1 << 20


def good(context: Context) -> None:
    with context.step("sum") as step:
        total = float(torch.ones(512, 512).sum())
    context.figure("sum", torch.float32, (512, 512), abs(total - 512 * 512), 1.0, step.seconds)
    context.traits["threads"] = torch.get_num_threads()


def fpe(context: Context) -> None:
    context.step("linear bf16 2x1024x18432 bias")
    ctypes.CDLL(os.environ["ENVBUILD_TEST_LIBRARY"]).divide(1, 0)


def segv(context: Context) -> None:
    context.step("step one")
    context.step("step two")
    ctypes.string_at(0)


def hang(context: Context) -> None:
    context.step("waiting")
    sleeping_in_a_named_function()


def sleeping_in_a_named_function() -> None:
    time.sleep(600)


def hang_stubborn(context: Context) -> None:
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
    time.sleep(600)


def hang_in_c(context: Context) -> None:
    """Holds the interpreter: only signals from outside reach it."""
    ctypes.PyDLL(None).sleep(600)


def killed(context: Context) -> None:
    context.step("allocating")
    os.kill(os.getpid(), signal.SIGKILL)


def wedged(context: Context) -> None:
    """Cannot be reaped: a tracer outside its group holds it, as a driver would hold it in the kernel."""
    read_end, write_end = os.pipe()
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER, PR_SET_PTRACER_ANY, for Yama
    if os.fork() == 0:
        os.setsid()
        seized = libc.ptrace(0x4206, parent, 0, 0)  # PTRACE_SEIZE
        os.write(write_end, b"1" if seized == 0 else b"0")
        time.sleep(8)  # longer than the harness waits; then the kernel releases it
        os._exit(0)
    if os.read(read_end, 1) == b"0":
        raise Skip("ptrace is not allowed here")
    time.sleep(600)


def exception(context: Context) -> None:
    context.step("doing")
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nsecond line")


def reported_failure(context: Context) -> None:
    raise ProbeFailure("mismatch", "one is two")


def later_cases(context: Context) -> None:
    context.step("first")
    context.fail("bound", "first is off")
    context.step("second")
    context.fail("nonfinite", "second is NaN")


def fault_then_skip(context: Context) -> None:
    context.step("first")
    context.fail("bound", "first is off")
    context.step("second")
    raise Skip("the second cannot be tried")


def memory(context: Context) -> None:
    torch.empty(1 << 50, dtype=torch.uint8)


def silent(context: Context) -> None:
    os._exit(0)


def exit_three(context: Context) -> None:
    os._exit(3)


def sys_exit(context: Context) -> None:
    sys.exit(0)


def _writing(change: Callable[[bytes], bytes]) -> Callable[[Context], None]:
    def probe(context: Context) -> None:
        module: Any = probe_process
        write = module.write_all
        module.write_all = lambda fd, data: write(fd, change(data))

    return probe


def noise(context: Context) -> None:
    for fd in (1, 2):
        for _ in range(NOISE >> 16):
            os.write(fd, b"x" * (1 << 16))
    print("from Python too")


def forged(context: Context) -> None:
    """Writes a frame with the nonce of this run to descriptors 0 to 2, and to every other descriptor that is not a
    pipe."""
    body = b'{"kind":"end","probes":1,"passed":1,"failed":0,"skipped":0}'
    line = b"ENVBUILD %s 0 %08x %s\n" % (context.job.nonce.encode(), zlib.crc32(body), body)
    for link in list(Path("/proc/self/fd").iterdir()):
        try:
            if int(link.name) <= 2 or not str(link.readlink()).startswith("pipe:"):
                os.write(int(link.name), line)
        except OSError:
            continue
    raise RuntimeError("the forger has run")


def orphan(context: Context) -> None:
    """Leaves a process behind that holds its pipes."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    context.traits["orphan"] = pid


def nan_figure(context: Context) -> None:
    context.figure("nan", torch.float16, (1, 2), float("nan"), 0.5, 0.0)
    context.figure("inf", torch.float16, (1, 2), float("inf"), 0.0, 0.0)
    context.fail("nonfinite", "NaN")


def skip(context: Context) -> None:
    raise Skip("no reason but this")


def stdin(context: Context) -> None:
    assert sys.stdin.read() == ""


def interruptible(context: Context) -> None:
    Path(os.environ["ENVBUILD_TEST_PID"]).write_text(str(os.getpid()))
    time.sleep(600)


PROBES = (
    Probe("good", "quick", "cpu", 60, good),
    Probe("fpe", "quick", "cpu", 60, fpe),
    Probe("segv", "quick", "cpu", 60, segv),
    Probe("hang", "quick", "cpu", 0.5, hang),
    Probe("hang-stubborn", "quick", "cpu", 0.5, hang_stubborn),
    Probe("hang-in-c", "quick", "cpu", 0.5, hang_in_c),
    Probe("killed", "quick", "cpu", 60, killed),
    Probe("wedged", "quick", "cpu", 0.5, wedged),
    Probe("exception", "quick", "cpu", 60, exception),
    Probe("reported-failure", "quick", "cpu", 60, reported_failure),
    Probe("later-cases", "quick", "cpu", 60, later_cases),
    Probe("fault-then-skip", "quick", "cpu", 60, fault_then_skip),
    Probe("memory", "quick", "cpu", 60, memory),
    Probe("silent", "quick", "cpu", 60, silent),
    Probe("exit-three", "quick", "cpu", 60, exit_three),
    Probe("sys-exit", "quick", "cpu", 60, sys_exit),
    Probe("cut", "quick", "cpu", 60, _writing(lambda data: data[:-5])),
    Probe("corrupt", "quick", "cpu", 60, _writing(lambda data: data[:-5] + b"xxxxx")),
    Probe("doubled", "quick", "cpu", 60, _writing(lambda data: data + data)),
    Probe("noise", "quick", "cpu", 60, noise),
    Probe("forged", "quick", "cpu", 60, forged),
    Probe("orphan", "quick", "cpu", 60, orphan),
    Probe("nan-figure", "quick", "cpu", 60, nan_figure),
    Probe("skip", "quick", "cpu", 60, skip),
    Probe("needs-gpu", "quick", "cuda", 60, good),
    Probe("stdin", "quick", "cpu", 60, stdin),
    Probe("deep", "standard", "cpu", 60, good),
    Probe("interruptible", "full", "cpu", 600, interruptible),
)
