"""nvidia-smi for the simulated GPU: `python -m pretend.nvidia_smi OPTION...` answers the queries of gpu_check.py.

The environment variable PRETEND_GPU names the GPU, and PRETEND_LEDGER the folder that has the memory use of each
process (ledger.py). Clocks and temperature never change.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import ledger
from .gpus import GPU, GPUS

_QUERIED = """
==============NVSMI LOG==============
Driver Version                            : {driver}
Attached GPUs                             : 1
GPU 00000000:1A:00.0
    Product Name                          : {name}
    Serial Number                         : 1650123456789
    GPU UUID                              : GPU-11111111-2222-3333-4444-555555555555
"""
DRIVER = "580.159.04"
_CONSTANT = {
    "timestamp": "2026/01/01 00:00:00.000",
    "clocks.sm": "1980",
    "clocks.mem": "2619",
    "power.draw": "350.00",
    "temperature.gpu": "40",
    "utilization.gpu": "100",
    "clocks_event_reasons.active": "0x0000000000000001",
}


def main(arguments: Sequence[str]) -> int:
    gpu = GPUS[os.environ[GPU]]
    if list(arguments) == ["-q"]:
        print(_QUERIED.format(driver=DRIVER, name=gpu.name))
        return 0
    fields = arguments[0].removeprefix("--query-gpu=").split(",")
    repeat = float(arguments[-1]) / 1000 if "-lms" in arguments else 0.0
    while True:
        answers = {
            **_CONSTANT,
            "name": gpu.name,
            "compute_cap": "{}.{}".format(*gpu.capability),
            "memory.used": str(ledger.in_use(Path(os.environ[ledger.FOLDER])) >> 20),
        }
        unknown = [field for field in fields if field not in answers]
        if unknown:
            print(f'Field "{unknown[0]}" is not a valid field to query.')
            return 2
        print(", ".join(answers[field] for field in fields), flush=True)
        if not repeat:
            return 0
        time.sleep(repeat)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
