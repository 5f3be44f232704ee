"""init.alloc: cuBLAS creates its handle when memory is nearly full, and in eight processes at once.

If creating the handle fails, torch reports CUBLAS_STATUS_NOT_INITIALIZED, both for missing memory and for a faulty
library. To find out which of the two it is, the probe then runs the same product in one process, without holding
memory. If the GPU's compute mode excludes further processes, CUDA reports a different error, and the probe queries NVML
for the mode. On the CPU, a limit on the address space replaces the GPU's memory.
"""

from __future__ import annotations

import math
import os
import select
from collections.abc import Sequence

import torch

from envbuild.selftest.harness import forked_work
from envbuild.selftest.harness.forked_work import ForkedWork, ForkEnding, Tell, Work
from envbuild.selftest.harness.probe_context import Context, missing_gpu
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.nvidia.gpu_telemetry import Gpus
from envbuild.selftest.nvidia.nvml_ctypes import COMPUTE_MODES

HELD = 0.9  # share of the free memory that the probe allocates; less on a GPU if ROOM requires it
TOGETHER = 8  # number of processes
ROOM = 512 << 20  # bytes left for each process on a GPU, for the libraries that cuBLAS loads with its handle
CPU_MEMORY = 512 << 20  # bytes of address space for each process
SECONDS = 60.0
SIZE = 64
BUSY = "busy or unavailable"  # part of the message of cudaErrorDevicesUnavailable
EXCLUSIVE = "EXCLUSIVE_PROCESS"


class Gate:
    """A barrier: blocks each process until all processes have reached it or ended, or until a time limit."""

    def __init__(self) -> None:
        self._came, self._go = os.pipe(), os.pipe()

    def wait(self) -> None:
        """Wait until the gate opens; called in a forked process. A running process that never calls `wait` keeps all
        other processes waiting until the time limit of `open`."""
        os.close(self._go[1])
        os.close(self._came[1])
        os.read(self._go[0], 1)

    def open(self, seconds: float) -> None:
        """Open the gate when all processes have reached it, after `seconds` at the latest; called in the parent."""
        os.close(self._came[1])
        select.select([self._came[0]], (), (), seconds)  # readable once every process has closed its end
        for fd in (*self._go, self._came[0]):
            os.close(fd)


def init_alloc(context: Context) -> None:
    """init.alloc: the first product works with 90% of memory in use; from standard on also in 8 processes at once."""
    for count in (1, TOGETHER) if context.at_least("standard") else (1,):
        case = "1 process" if count == 1 else f"{count} processes at once"
        context.step(f"{case}, {HELD:.0%} of memory held")
        endings = allocate_in_parallel(context.job.device, count)
        reasons = [ending.reported["skip"] for ending in endings if "skip" in ending.reported]
        if reasons:
            raise Skip(str(reasons[0]))
        failed = [ending for ending in endings if ending.failure]
        busy = any(BUSY in str(ending.failure) for ending in failed)
        if busy:
            context.traits["compute_mode"] = compute_mode()
            if context.traits["compute_mode"] == EXCLUSIVE and len(failed) < count:
                context.traits[case] = {"left_out": f"the GPU's compute mode is {EXCLUSIVE}: one process at a time"}
                continue
        errors = [float(ending.reported.get("off", "nan")) for ending in endings]
        worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
        seconds = max(ending.seconds for ending in endings)
        context.figure(case, torch.float32, (SIZE, SIZE, SIZE), worst, 0.0, seconds)
        context.traits[case] = {"held": [ending.reported.get("held") for ending in endings]}
        if failed:
            context.fail(*(_busy if busy else _memory_or_library)(context, failed, count))
        elif worst != 0:
            context.fail("mismatch", f"{case}: the product is wrong by {worst:g}")


def allocate_in_parallel(device: str, count: int) -> Sequence[ForkEnding]:
    """Run the first product in `count` processes at once, each of which allocates its share of the memory.

    The first gate opens when all processes have started the device, the second when all have computed their shares.
    Each share is therefore computed from the same amount of free memory, before any process allocates.
    """
    gates = Gate(), Gate()
    processes = [ForkedWork(_product(device, count, gates)) for _ in range(count)]
    for gate in gates:
        gate.open(SECONDS / 3)
    return [process.finish(SECONDS) for process in processes]


def _product(device: str, count: int, gates: Sequence[Gate] = ()) -> Work:
    """Return a function that starts the device, allocates memory if there are gates, and runs a matrix product. The
    product makes the library create its handle."""

    def work(tell: Tell) -> None:
        torch.set_num_threads(1)  # each thread's stack uses address space
        tell("at", "the start of the device")
        if device == "cuda":
            missing = missing_gpu()
            if missing:
                tell("skip", missing)
                return
        ones = torch.ones((SIZE, SIZE), device=device)
        held = _hold(tell, device, count, gates) if gates else None
        tell("at", "the first product")
        got = torch.mm(ones, ones).cpu()
        del held
        tell("off", float((got - SIZE).abs().max()))

    return work


def _hold(tell: Tell, device: str, count: int, gates: Sequence[Gate]) -> torch.Tensor:
    started, measured = gates
    started.wait()
    tell("at", "the allocation of its share of the memory")
    size = _share(device, count)
    tell("held", size)
    measured.wait()
    return torch.empty(size, dtype=torch.uint8, device=device)


def _share(device: str, count: int) -> int:
    """Return the bytes that one of `count` processes allocates. On the CPU, first limit the address space of the
    process."""
    if device == "cuda":
        free = int(torch.cuda.mem_get_info()[0])
        return max(0, int(min(HELD * free, free - count * ROOM)) // count)
    forked_work.limit_memory(CPU_MEMORY)
    return int(HELD * CPU_MEMORY)


def compute_mode() -> str | None:
    """Return the compute mode of the first GPU that this process may use. NVML is queried in a separate process,
    because the query starts the driver."""
    return forked_work.run_forked(_ask_mode, SECONDS).reported.get("mode")


def _ask_mode(tell: Tell) -> None:
    modes = [COMPUTE_MODES.get(numbers.get("compute_mode", -1)) for numbers in Gpus().numbers().values()]
    tell("mode", modes[0] if modes else None)


def _busy(context: Context, failed: Sequence[ForkEnding], count: int) -> tuple[str, str]:
    """Return (failure, reason) if CUDA reports that the GPU is unavailable. The cause is then neither memory nor the
    library."""
    mode = context.traits["compute_mode"]
    what = f"{len(failed)} of {count} processes failed at {failed[0].reported.get('at')}: {failed[0].failure}"
    if mode in (None, "DEFAULT"):
        said = f"its compute mode is {mode}" if mode else "NVML does not report its compute mode"
        return "exception", f"{what}; {said}: another process occupies the GPU, or the GPU needs a reset"
    remedy = "nvidia-smi --compute-mode=DEFAULT allows all processes to use it"
    return "exception", f"{what}; the GPU's compute mode is {mode}: {remedy}"


def _memory_or_library(context: Context, failed: Sequence[ForkEnding], count: int) -> tuple[str, str]:
    """Return (failure, reason). Memory is the cause if one process alone succeeds, with the memory free. Otherwise the
    library or the GPU is the cause."""
    first = failed[0]
    what = f"{len(failed)} of {count} processes failed at {first.reported.get('at')}: {first.failure}"
    alone = forked_work.run_forked(_product(context.job.device, 1), SECONDS)
    context.traits["alone"] = alone.failure or "works"
    if alone.failure:
        return "exception", f"{what}; one process with the memory free fails too: the cause is the library or the GPU"
    remedy = "start the processes one after the other, and leave memory free"
    return "oom", f"{what}; one process with the memory free works: the cause is memory; {remedy}"
