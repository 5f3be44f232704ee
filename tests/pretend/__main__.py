"""Run the harness over a module's PROBES on a simulated GPU: `python -m pretend GPU MODULE JOB FILE`.

The traits of each probe's result then contain `simulated`: `peak_bytes`, the most bytes of the GPU's memory in use at
once; `host_seconds` (processor time, including child processes) and `host_wall_seconds`, both without the time of the
simulation (clock.py); and `device_operations`, the number of torch's operations that ran on the simulated GPU.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

from selftest import driver

from envbuild.selftest.harness import probe_process
from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import Outcome

from . import clock, sizes, tensors
from .gpus import GPUS
from .runtime import install


def measured(
    attempt: Callable[[Probe, JobDocument, Context], Outcome],
) -> Callable[[Probe, JobDocument, Context], Outcome]:
    @functools.wraps(attempt)
    def measuring(probe: Probe, job: JobDocument, context: Context) -> Outcome:
        tensors.here.memory.reset_peak()
        begin, begin_simulated = clock.of_host(), tensors.here.clock.read()
        outcome = attempt(probe, job, context)
        simulated = tensors.here.clock.read() - begin_simulated
        host = (clock.of_host() - begin) - simulated
        simulation = {
            "peak_bytes": tensors.here.memory.peak,
            "host_seconds": round(host.processor, 3),
            "host_wall_seconds": round(host.wall, 3),
            "device_operations": simulated.entries,
        }
        return dataclasses.replace(outcome, traits={**outcome.traits, "simulated": simulation})

    return measuring


def main(gpu: str, module: str, job: str, path: str) -> int:
    install(GPUS[gpu])
    sizes.reduce()
    patched: Any = probe_process
    patched._attempt = measured(probe_process._attempt)
    return driver.main(module, job, path)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
