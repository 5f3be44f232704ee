"""Probes for the limits of a job, and one whose planning makes the parent call torch."""

import torch

from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context

from .faults import good


def gigabyte(context: Context) -> None:
    torch.empty(1 << 30, dtype=torch.uint8)


class Touching(str):
    """A probe's name that calls torch when the harness looks at it, as could happen after a careless change of the
    harness."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        torch.zeros(1)
        torch.cuda.is_available()
        return str.__eq__(self, other)


PROBES = (
    Probe("good", "quick", "cpu", 60, good),
    Probe("gigabyte", "quick", "cpu", 60, gigabyte),
    Probe(Touching("touching"), "quick", "cpu", 60, good),
)
