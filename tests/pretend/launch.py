"""Runs of the self-test on simulated GPUs, for the tests and the campaign."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selftest import seeding, stubs, torch_fork_server
from selftest.reading import Frame, environment, job, outcomes, read

from envbuild.selftest.harness.job_document import DATASHEET, FLOORS

from .gpus import GPUS

CATALOGUE, SEEDS = "envbuild.selftest.probes.probe_catalogue", "selftest.seeds.on_gpus"
OWN = {"script": {"name": "own.py", "text": "import torch\nassert torch.ones(2, device=device).sum().item() == 2\n"}}
DRIVER = "580.159.04"
# A step of milliseconds on a GPU takes minutes on a shared processor, so the time limit is long. It is short for the
# seed that hangs until its limit.
TIMEOUT, TIMEOUTS = 3000, {"gemm.exact:hangs": 10}


def variables(folder: Path) -> dict[str, str]:
    """Compile into this folder: stand-ins for the driver's libraries, and a library that the seeds call. Return the
    environment variables that name these libraries. Skips the test if gcc is missing."""
    built = stubs.build(folder / "driver", release=DRIVER)
    return {**built, **seeding.library(folder), "STUB_CUDA": "13000", "STUB_DRIVER": DRIVER}


def document(gpu: str, level: str, names: Sequence[str], probes: Sequence[str] | None = None, **fields: Any) -> Frame:
    """Return a job for this GPU. `names`: all existing probes; `probes`: those to run, or None for the level's."""
    model = GPUS[gpu]
    promised = dict.fromkeys(DATASHEET, 1e-9)  # so that perf.* has a value to compare with
    known = {"compute_capability": "{}.{}".format(*model.capability), "sms": model.sms}
    expect = {"gpus": [model.name], "cards": {model.name: known}, "datasheets": {model.name: promised}}
    timeouts = {name: TIMEOUTS.get(name, TIMEOUT) for name in names}
    given = {"level": level, "probes": probes, "expect": expect, "timeouts": timeouts, "own": OWN, **fields}
    return job(device="cuda", threads=1, burn_seconds=1, floors=dict.fromkeys(FLOORS, 0.5), **given)


def run(gpu: str, module: str, given: Frame, file: Path, *, forked: bool = False, **extra: str) -> dict[str, Frame]:
    """Run the self-test on this GPU, and return the result of each probe by its name. `module` has the PROBES; the
    frames go to `file`. `forked`: from a process that has imported torch, which saves time if there are several runs,
    but leaves the time of the start out."""
    arguments, variables = [gpu, module, json.dumps(given), str(file)], environment(**extra)
    done: subprocess.CompletedProcess[str]
    if forked:
        done = torch_fork_server.run("pretend.__main__:main", arguments, variables, timeout=TIMEOUT)
    else:
        command = [sys.executable, "-W", "ignore", "-m", "pretend", *arguments]
        done = subprocess.run(
            command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    assert done.returncode in (0, 5), done.stderr[-4000:]
    return outcomes(read(file.read_bytes()))
