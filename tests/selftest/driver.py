"""Runs a module's PROBES through the real harness: `python -m selftest.driver MODULE JOB FILE`.

JOB is a job document as JSON; the frames go to FILE. With ENVBUILD_TEST_PROFILE set, the last line of stderr is a JSON
document: `calls`, torch's functions that the parent process called while the harness ran, and `threads`, the number of
its threads.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from envbuild.selftest.__main__ import take
from envbuild.selftest.harness import probe_scheduler, probe_supervisor
from envbuild.selftest.harness.frame_and_message_streams import FrameWriter
from envbuild.selftest.harness.job_document import parse

TORCH = str(Path(torch.__file__).parent)


class Calls:
    """Records every call of torch, in Python or in C, made by this process but not by its children."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __enter__(self) -> "Calls":
        os.register_at_fork(after_in_child=lambda: sys.setprofile(None))
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(TORCH):
            self.found.append(frame.f_code.co_name)
        if event == "c_call":
            owner = getattr(argument, "__self__", None)
            owner_type = owner if isinstance(owner, type) else type(owner)
            names = (argument.__module__ or "", owner_type.__module__, getattr(owner, "__name__", ""))
            # torch.__version__ is an instance of a subclass of str. Calls of str's own methods on it, such as format,
            # are not recorded.
            if any(str(name).split(".")[0] == "torch" for name in names) and not isinstance(owner, str):
                self.found.append(argument.__qualname__)


def main(module: str, job: str, path: str) -> int:
    probes = importlib.import_module(module).PROBES
    out = take(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    parsed = parse(json.loads(job), frozenset(probe.name for probe in probes))
    terms = probe_supervisor.Terms(dump=0.5, death=1.0, hidden=(out,))
    writer = FrameWriter(out, parsed.nonce)
    try:
        if not os.environ.get("ENVBUILD_TEST_PROFILE"):
            return 0 if probe_scheduler.run(probes, parsed, writer, terms) else 5
        with Calls() as calls:
            probe_scheduler.run(probes, parsed, writer, terms)
        tasks = len(list(Path("/proc/self/task").iterdir()))
        print(json.dumps({"calls": calls.found, "threads": tasks}), file=sys.stderr)
        return 0
    except probe_scheduler.RunInterrupted as interruption:
        return 128 + interruption.number


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
