"""Imported by the interpreter of an envbuild under test, by way of PYTHONPATH. Kills this envbuild where environment
variables say.

CHAOS_AT     "begin STEP", "end STEP", or "effect N": envbuild gets SIGKILL at that moment; nothing is cleaned up
CHAOS_TRACE  a file that gets a line for each effect: what was about to be done to files, programs or the engine
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_EFFECTS = {"os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.symlink", "subprocess.Popen"}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def described_effect(event: str, arguments: tuple[Any, ...]) -> str | None:
    """Describe in words a file or folder that is written, renamed or removed, a program that is started, or an HTTP
    request; None for any other event."""
    if event in _EFFECTS:
        return f"{event} {arguments[0]}"
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING and arguments[0] != os.devnull:
        return f"write {arguments[0]}"
    if event == "http.client.send":
        first = bytes(arguments[1]).partition(b"\r\n")[0] if isinstance(arguments[1], bytes | bytearray) else b"body"
        return f"http {first.decode(errors='replace')}"
    return None


class Effects:
    """Counts the effects from the first step on, in this process only."""

    def __init__(self, number: int, trace: str | None) -> None:
        self.number, self.trace, self.seen = number, trace, 0
        self.begun = self.busy = False
        self.pid = os.getpid()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.begun or self.busy or os.getpid() != self.pid:
            return
        self.busy = True  # what happens in here is not counted as an effect
        try:
            words = described_effect(event, arguments)
            if words is not None:
                self.seen += 1
                if self.trace:
                    with Path(self.trace).open("a", encoding="utf-8") as stream:
                        stream.write(f"{words}\n")
                if self.seen == self.number:
                    die()
        finally:
            self.busy = False


def watch(moment: str, trace: str | None) -> None:
    from envbuild.pipeline.step_context import StepContext

    kind, _, rest = moment.partition(" ")
    effects = Effects(int(rest) if kind == "effect" else 0, trace)
    original: Any = StepContext.step

    def step(self: StepContext, name: str, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        effects.begun = True
        if (kind, rest) == ("begin", name):
            die()
        value = original(self, name, function, *inputs, **options)
        if (kind, rest) == ("end", name):
            die()
        return value

    setattr(StepContext, "step", step)  # noqa: B010
    if kind == "effect" or trace:
        sys.addaudithook(effects)


if sys.orig_argv[1:3] == ["-m", "envbuild"] and ("CHAOS_AT" in os.environ or "CHAOS_TRACE" in os.environ):
    watch(os.environ.get("CHAOS_AT", ""), os.environ.get("CHAOS_TRACE"))
