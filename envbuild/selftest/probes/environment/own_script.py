"""own.script: a project's own smoke test, in the same harness as every other probe.

The script is run as `python script.py` would run it, with three names in its globals:

    device          the torch.device to test
    step(name)      announces a step, so that a report of a crash can name it; `with step(name) as s:` times it
    fail(text)      records a fault and continues

The script passes if it reaches its end or sys.exit(0) without a recorded fault. It fails if it raises an exception,
exits with a different status, records a fault, or calls os._exit, which prevents a result.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from pathlib import Path

import torch

from envbuild.selftest.harness.probe_context import Context, ProbeStep
from envbuild.selftest.harness.probe_outcome_and_figures import ProbeFailure

_LONGEST = 500  # maximum number of characters kept of a script's own messages


def own_script(context: Context) -> None:
    """own.script: the profile's own script ends with exit status 0 and without a recorded fault."""
    own = context.job.own.script
    assert own is not None, "the harness does not run this probe without a script"
    context.traits.update(name=own.name, sha256=own.sha256)

    def step(name: object) -> ProbeStep:
        return context.step(str(name)[:_LONGEST])

    def fail(*words: object) -> None:
        if len(words) != 1 or not str(words[0]).strip():
            raise TypeError('fail() takes one string: fail("what is wrong")')
        context.fail("mismatch", str(words[0])[:_LONGEST])

    with tempfile.TemporaryDirectory(prefix=context.folders) as folder:
        # A real file, because tracebacks, inspect, torch.compile and child processes need one.
        file = Path(folder, own.name)
        file.write_text(own.text, encoding="utf-8")
        sys.argv = [str(file)]
        try:
            runpy.run_path(str(file), {"device": context.device, "step": step, "fail": fail}, run_name="__main__")
        except SystemExit as end:
            if end.code is not None and end.code != 0:
                words = end.code.strip() if isinstance(end.code, str) else ""
                said = f"the script ended: {words}" if words else f"the script ended with exit({end.code!r})"
                raise ProbeFailure("exit", said[:_LONGEST]) from end
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # raises pending errors of kernels
