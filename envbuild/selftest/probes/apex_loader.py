"""The apex that is installed here: its modules, or why there are none to test."""

from __future__ import annotations

import importlib
from typing import Any

from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.inventory import interpreter_and_distributions


def part(name: str, compiled: str) -> Any:
    """apex.`name`, whose kernels lie in the module `compiled`.

    Raises Skip if apex is not installed, if the package of that name is not NVIDIA's, or if it was built without
    `compiled`. An exception of either import passes through, for example if apex was built for a different torch.
    """
    found = interpreter_and_distributions.apex()
    if found is None:
        raise Skip("apex is not installed")
    if name not in found["parts"]:
        raise Skip(f"{found['path']} is not NVIDIA's apex: it has no apex.{name}")
    if compiled not in found["compiled"]:
        raise Skip(f"{found['path']} was built without its CUDA extensions: module {compiled} is missing")
    importlib.import_module(compiled)  # apex itself would hide why it cannot be loaded
    return importlib.import_module(f"apex.{name}")
