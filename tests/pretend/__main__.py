"""Run the harness over a module's PROBES on a simulated GPU: `python -m pretend GPU MODULE JOB FILE`.

Each probe's traits then have `simulated`: the most bytes of the GPU's memory in use at once, and the seconds of
processor time that it and its processes spent on the host, without what the GPU would have computed.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from selftest import driver

from envbuild.selftest import child
from envbuild.selftest.context import Context
from envbuild.selftest.job import Job
from envbuild.selftest.outcome import Outcome
from envbuild.selftest.probes import attention, attention_backward, attention_needle, burn, crash, large, memory, perf
from envbuild.selftest.registry import Probe

from . import tensors
from .gpus import GPUS
from .runtime import install


def _few(module: Any) -> Callable[..., int]:
    """In place of how many chunks of memory a probe fills."""
    return lambda *_: int(module.CHUNKS_CPU)


# Of level full, whose size is the GPU's: no CPU multiplies or fills that much.
SMALL: tuple[tuple[Any, str, Any], ...] = (
    (burn, "SIDE", burn.SIDE_CPU),
    (memory, "CHUNK", memory.CHUNK_CPU),
    (large, "ROWS", 67),
    *((module, "chunks_within", _few(module)) for module in (burn, memory)),
)
# With the variable SHORT attention is as short as on the CPU, and other sizes too: for what does not depend on them.
SHORT = "PRETEND_SHORT"
SHORTER: tuple[tuple[Any, str, Any], ...] = (
    (attention, "LONG", attention.LONG_CPU),
    (attention, "HEADS", attention.HEADS_FEW),
    (attention_needle, "LONG", attention_needle.LONG_CPU_QUICK),
    (attention_needle, "CASES", attention_needle.CASES_QUICK),
    (attention_backward, "LONG", attention_backward.LONG_CPU),
    (attention_backward, "HEADS", attention_backward.HEADS_CPU),
    (crash, "_INNER_COLUMNS", crash._INNER_COLUMNS[:1]),
    (perf, "SIDE", perf.SIDE_CPU),
    (perf, "COPIED", perf.COPIED_CPU),
)


def measured(attempt: Callable[[Probe, Job, Context], Outcome]) -> Callable[[Probe, Job, Context], Outcome]:
    @functools.wraps(attempt)
    def measuring(probe: Probe, job: Job, context: Context) -> Outcome:
        tensors.here.memory.reset_peak()
        begin = sum(os.times()[:4])
        outcome = attempt(probe, job, context)
        host = sum(os.times()[:4]) - begin - tensors.here.seconds
        told = {"peak_bytes": tensors.here.memory.peak, "host_seconds": round(host, 3)}
        return dataclasses.replace(outcome, traits={**outcome.traits, "simulated": told})

    return measuring


def main(gpu: str, module: str, job: str, path: str) -> int:
    install(GPUS[gpu])
    for owner, name, value in (*SMALL, *(SHORTER if os.environ.get(SHORT) else ())):
        assert hasattr(owner, name), f"{owner.__name__} has no {name}: what bounds its size now?"
        setattr(owner, name, value)
    patched: Any = child
    patched._attempt = measured(child._attempt)
    return driver.main(module, job, path)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
