"""Import modules of the installed apex, or skip the probe with the reason why they cannot be tested."""

from __future__ import annotations

import importlib
from typing import Any

from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.inventory import interpreter_and_distributions


def part(name: str, compiled: str) -> Any:
    """Import apex.`name`, whose compiled kernels are in the extension module `compiled`.

    Raises Skip if apex is not installed, if the installed package called apex is not NVIDIA's, or if apex was built
    without `compiled`. Other import errors propagate, for example if apex was built for a different torch version.
    """
    found = interpreter_and_distributions.apex()
    if found is None:
        raise Skip("apex is not installed")
    if name not in found["parts"]:
        raise Skip(f"{found['path']} is not NVIDIA's apex: it has no apex.{name}")
    if compiled not in found["compiled"]:
        raise Skip(f"{found['path']} was built without its CUDA extensions: module {compiled} is missing")
    importlib.import_module(compiled)  # if this import fails, apex would hide the reason
    return importlib.import_module(f"apex.{name}")
