"""Imported by the interpreter of an envbuild under test, by way of PYTHONPATH; does only what the environment variables
ask for.

E2E_HOLD    "STEP start" or "STEP write": stop when that step begins, or when it has a file half written
E2E_HOLDING the file that appears when the process has stopped; it goes on when the file is removed
E2E_FREE    the free space reported for every disk, in bytes
E2E_REQUIRED_ALONE  run only those probes of a self-test that the profile requires, so that it takes seconds
"""

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 60


def hold(*_: object) -> None:
    """Report that this process waits, until it is released or interrupted."""
    sign = Path(os.environ["E2E_HOLDING"])
    sign.touch()
    end = time.monotonic() + PATIENCE
    while sign.exists() and time.monotonic() < end:
        time.sleep(0.01)


def hold_step(wanted: str, moment: str) -> None:
    from envbuild.pipeline.step_context import StepContext

    original: Any = StepContext.step

    def step(self: StepContext, name: str, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        if name != wanted:
            return original(self, name, function, *inputs, **options)
        if moment == "write":
            setattr(os, "fsync", hold)  # noqa: B010
            return original(self, name, function, *inputs, **options)

        def held() -> Any:
            hold()
            return function(*inputs, **options)

        return original(self, name, held)

    setattr(StepContext, "step", step)  # noqa: B010


def pretend_free(count: int) -> None:
    usage = shutil.disk_usage

    def disk_usage(path: Any) -> Any:
        return usage(path)._replace(free=count)

    shutil.disk_usage = disk_usage


def run_required_probes_alone() -> None:
    from envbuild.testrun import selftest_job

    original = selftest_job.document

    def document(*arguments: Any, **keys: Any) -> dict[str, Any]:
        made = original(*arguments, **keys)
        return {**made, "probes": made["probes"] or made["require"]}

    selftest_job.document = document


if ["-m", "envbuild"] in (sys.orig_argv[1:3], sys.orig_argv[2:4]):  # -P comes before it for one of several profiles
    if "E2E_HOLD" in os.environ:
        hold_step(*os.environ["E2E_HOLD"].rsplit(" ", 1))
    if "E2E_FREE" in os.environ:
        pretend_free(int(os.environ["E2E_FREE"]))
    if "E2E_REQUIRED_ALONE" in os.environ:
        run_required_probes_alone()
