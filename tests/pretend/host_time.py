"""Host time of level standard on a simulated H100, by probe: `make pretend-host`, on a quiet machine.

python tests/pretend/host_time.py [--threads 2]      writes benchmarks/results/host_time.md
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "benchmarks")]

from machine import described, write  # noqa: E402
from options import positive, program  # noqa: E402
from selftest.reading import Frame, environment  # noqa: E402

from envbuild.facts import probe_catalogue_reader  # noqa: E402
from envbuild.selftest.harness.probe import Probe  # noqa: E402
from envbuild.selftest.harness.probe_scheduler import companions  # noqa: E402
from envbuild.selftest.probes.probe_catalogue import PROBES  # noqa: E402
from pretend import expected, launch  # noqa: E402
from pretend.clock import Spent  # noqa: E402
from pretend.gpus import GPUS  # noqa: E402

MODEL, LEVEL = "h100", "standard"
NAMES = list(probe_catalogue_reader.known_probes())
# What one kernel launch of torch costs the host of a real GPU: an assumption, not measured here.
LAUNCH = 5e-6
OVERHEAD = """
import time, torch
from pretend import gpus, runtime, tensors
torch.set_num_threads(1)
runtime.install(gpus.GPUS["h100"])
x = torch.zeros(4, device="cuda")
def seconds():
    begin, counted = time.process_time(), tensors.here.clock.read().processor
    for _ in range(20000):
        x.abs()
    return (time.process_time() - begin - (tensors.here.clock.read().processor - counted)) / 20000
print(min(seconds() for _ in range(5)))
"""


def spent(work: Callable[[], object]) -> Spent:
    """Return the time used by the processes that `work` starts and waits for."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(processor, time.perf_counter() - begin)


def start() -> Spent:
    """Return the start-up time of the self-test without running a probe: importing Python, torch and the probes."""
    command = [sys.executable, "-m", "envbuild.selftest", "--list"]
    return spent(lambda: subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, check=True))


def overhead() -> float:
    """Return the seconds that the simulation adds to an operation on the device beyond LAUNCH, without the time that
    the clock counts."""
    command = [sys.executable, "-c", OVERHEAD]
    printed = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True).stdout
    return max(0.0, float(printed) - LAUNCH)


def of_probe(frame: Frame, beyond: float) -> Spent:
    simulated = frame["traits"]["simulated"]
    left_out = beyond * simulated["device_operations"]
    return Spent(simulated["host_seconds"] - left_out, simulated["host_wall_seconds"] - left_out)


def in_pairs(probes: Sequence[Probe], seconds: Mapping[str, float]) -> float:
    """Return the wall time of probes that run at most two at a time, as the scheduler pairs them on two processors, if
    each probe takes as long as it takes alone."""
    now, left, ends = 0.0, list(probes), dict[str, float]()
    while left:
        for probe in (left[0], *companions(left)):
            if probe.name not in ends and sum(end > now for end in ends.values()) < 2:
                ends[probe.name] = now + seconds[probe.name]
        now = min(end for end in ends.values() if end > now)
        while left and ends.get(left[0].name, math.inf) <= now:
            del left[0]
    return now


def report(begin: Spent, beyond: float, found: Mapping[str, Frame], whole: Spent, threads: int) -> list[str]:
    """Return the page. `whole`: the time of the whole run, including the simulation's own time."""
    by_probe = {name: of_probe(frame, beyond) for name, frame in found.items()}
    rows = {"(start)": begin, **dict(sorted(by_probe.items(), key=lambda item: item[1].processor, reverse=True))}
    total = Spent(sum(one.processor for one in rows.values()), sum(one.wall for one in rows.values()))
    walls = {name: max(one.wall, 1e-6) for name, one in by_probe.items()}
    paired = begin.wall + in_pairs([probe for probe in PROBES if probe.name in walls], walls)
    return [
        f"# Host time of level {LEVEL} on a simulated {GPUS[MODEL].name}",
        "",
        f"Machine: {described()}. Made by `make pretend-host`, on the CPU: nothing of it has run on a GPU.",
        "",
        f"- Host: {total.processor:.1f} s of processor time, {total.wall:.1f} s of wall time, in a job of {threads} "
        f"threads; load of the machine (1 min) {os.getloadavg()[0]:.1f}.",
        "- Two probes at a time, as the self-test works on a GPU with memory for both: "
        f"{max(paired, total.processor / 2):.1f} s of wall time on 2 cores, calculated from the table.",
        f"- The run with the simulation: {whole.processor:.0f} s of processor time, {whole.wall:.0f} s of wall time.",
        "",
        "The host's time is the time of the probes without that of the simulation, which is counted separately",
        "(`tests/pretend/clock.py`). Copies between host and GPU, with their conversions, count as the host's.",
        f"{1e6 * beyond:.1f} µs are subtracted for each operation on the GPU: the call from C++ to Python and back,",
        f"measured before, less {1e6 * LAUNCH:.0f} µs, the assumed cost of launching a kernel on a real GPU. Wall time",
        "is that of the probe's own process, including its waiting, while no other probe runs.",
        "",
        "| probe | processor s | wall s |",
        "|---|---|---|",
        *(f"| {name} | {one.processor:.2f} | {one.wall:.2f} |" for name, one in rows.items()),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Host time of level standard on a simulated GPU, by probe.")
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="threads of the self-test")
    threads = parser.parse_args().threads
    begin, beyond = start(), overhead()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = {**launch.variables(folder), "STUB_TOTAL": "20"}  # GiB: too few for two probes at a time
        given = {**launch.document(MODEL, LEVEL, NAMES), "threads": threads}
        found: dict[str, Frame] = {}
        whole = spent(lambda: found.update(launch.run(MODEL, launch.CATALOGUE, given, folder / "frames", **variables)))
    write("host_time", report(begin, beyond, found, whole, threads))
    alarms = list(expected.alarms(MODEL, LEVEL, found))
    print(*alarms, sep="\n", file=sys.stderr)
    return 1 if alarms else 0


if __name__ == "__main__":
    program(main)
