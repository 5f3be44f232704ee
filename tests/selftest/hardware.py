"""Probes of the driver and the cards over stubs (stubs.py): each case says what the stubs are to answer."""

import os
from collections.abc import Mapping

import torch

from envbuild.selftest.catalogue import PROBES as REAL
from envbuild.selftest.context import Context
from envbuild.selftest.registry import Probe

CASES: Mapping[str, Mapping[str, str]] = {
    "env.driver:right": {"STUB_DRIVER": "580.65.06"},
    "env.driver:compat": {"STUB_DRIVER": "535.104.05"},
    "env.driver:old": {"STUB_DRIVER": "520.61.05"},
    "env.driver:unready": {"STUB_INIT": "802", "STUB_NAME": "CUDA_ERROR_SYSTEM_NOT_READY"},
    "env.driver:geforce": {"STUB_INIT": "804", "STUB_NAME": "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"},
    "env.driver:unknown": {"STUB_INIT": "999"},
    "env.driver:empty": {"STUB_INIT": "100"},
}


def case(name: str, answers: Mapping[str, str]) -> Probe:
    (real,) = (probe for probe in REAL if probe.name == name.partition(":")[0])

    def function(context: Context) -> None:
        torch.version.cuda = "13.0"
        os.environ.update(answers)  # the stubs' getenv sees it
        real.function(context)

    return Probe(name, "quick", real.needs, real.timeout, function, real.untouched)


PROBES = tuple(case(name, answers) for name, answers in CASES.items())
