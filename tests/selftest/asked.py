"""A probe of a level, and two that run only on request: the fingerprint, and the fingerprint of a wrong kernel."""

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.operations import fingerprint

from .faults import good
from .seeds.making import wrong_element

fingerprint.DTYPES = (torch.float32,)


def seeded(context: Context) -> None:
    F.linear = wrong_element(F.linear, torch.float32, (0, 7, 500), 0.1)
    fingerprint.fingerprint(context)


PROBES = (
    Probe("good", "quick", "cpu", 60, good),
    Probe("fingerprint", "on-request", "cpu", 60, fingerprint.fingerprint),
    Probe("seeded", "on-request", "cpu", 60, seeded),
)
