"""Runs the real dist.nodes. With the environment variable SEED=dies, the ranks of this machine die in the broadcast."""

import os
import signal
from typing import Any

import torch.distributed

from envbuild.selftest.probes.probe_catalogue import PROBES as REAL

PROBES = tuple(probe for probe in REAL if probe.name == "dist.nodes")


def dies(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


if os.environ.get("SEED") == "dies":
    torch.distributed.broadcast = dies
