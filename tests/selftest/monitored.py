"""Probes during which the simulated driver of stubs.py reports something, and probes that start CUDA while another
probe works."""

import os
import time
from pathlib import Path
from typing import Any

import torch

from envbuild.selftest.harness import probe_process
from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.nvidia import gpu_monitor

START = 0.8  # seconds that the simulated start of CUDA takes
WORK = 0.3


def during(name: str, *answers: str, skips: bool = False, dies: bool = False) -> Probe:
    """Return a probe that does nothing while NVML's answers become these ("NAME=NUMBER")."""

    def function(context: Context) -> None:
        context.step("working")
        time.sleep(WORK if "later" in name else 0)
        Path(os.environ["STUB_NOW"]).write_text("\n".join(answers) + "\n")
        if skips:
            raise Skip("there is nothing to do")
        if dies:
            os.abort()
        time.sleep(2 * gpu_monitor.PERIOD if "slowly" in name else 0)

    return Probe(name, "quick", "cpu", 60, function, untouched=True)


def note(what: str) -> None:
    with Path(os.environ["ENVBUILD_TEST_NOTES"]).open("a") as notes:
        notes.write(f"{what} {time.monotonic()}\n")


def working(name: str, alone: bool = False, untouched: bool = False) -> Probe:
    """Return a probe that takes WORK seconds, and records when it begins and ends."""

    def function(context: Context) -> None:
        note(f"begin {name}")
        time.sleep(WORK)
        note(f"end {name}")

    return Probe(name, "quick", "cpu", 60, function, untouched=untouched, alone=alone)


def aborts(context: Context) -> None:
    context.step("aborting")
    time.sleep(WORK)
    os.abort()


def sleeping(name: str) -> Probe:
    def function(context: Context) -> None:
        note(f"begin {name}")
        time.sleep(60)

    return Probe(name, "quick", "cpu", 60, function)


def starts() -> None:
    note("start")
    time.sleep(START)
    note("started")


if "ENVBUILD_TEST_NOTES" in os.environ:  # this harness must believe that there is a GPU
    cuda: Any = torch.cuda
    cuda.synchronize = starts
    module: Any = probe_process
    module.missing_gpu = lambda: None

PROBES = (
    during("sound", "STUB_CELSIUS=71"),
    during("xid", "STUB_XID=79"),
    during("after xid", "STUB_XID=79"),
    during("application", "STUB_XID=31"),
    during("ecc", "STUB_ECC=2", "STUB_CORRECTED=102"),
    during("ecc later", "STUB_ECC=2"),
    during("pending", "STUB_ECC=2", "STUB_PENDING=1"),
    during("failed", "STUB_PENDING=1", "STUB_FAILED=1"),
    during("retiring", "STUB_OLD=1", "STUB_RETIRING=1"),
    during("skips", "STUB_ECC=1", skips=True),
    during("dies", "STUB_ECC=9", dies=True),
    during("slowly", "STUB_LIMITED=68", "STUB_GENERATION=3", "STUB_REPLAYS=9", "STUB_NVLINK=3", "STUB_REMAPPED=8"),
    during("denied", "STUB_ERROR=4"),
    during("without ecc", "STUB_OLD=1"),
    during("lost", "STUB_ERROR=15"),
    during("hangs", "STUB_SLEEPS=60"),
    during("crashes", "STUB_CRASHES=1"),
    during("afterwards"),
    *(working(f"work{index}") for index in range(4)),
    working("alone", alone=True),
    *(working(f"more{index}") for index in range(2)),
    working("untouched", untouched=True),
    Probe("aborts", "quick", "cpu", 60, aborts),
    *(sleeping(f"sleeps{index}") for index in range(2)),
    working("last"),
    during("ecc later still", "STUB_ECC=7"),
)
