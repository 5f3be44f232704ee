"""What every runner is: it takes a job, and brings back the raw output of it. Where that is, is its own matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from envbuild.testrun.run_result import RawOutput
from envbuild.testrun.selftest_job import Job
from envbuild.util.errors import EnvbuildError


class RunnerError(EnvbuildError):
    """The job did not come to its end, for a reason that says nothing about the image: a node died, somebody
    cancelled it, its output was lost. It is no failure of the self-test, and no pass; `ending` says which."""

    code, kind = 6, "runner"

    def __init__(self, message: str, *, ending: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.ending = ending


def _nothing(told: object) -> None:
    """Whoever asked for the job does not watch."""


@dataclass(frozen=True)
class Watch:
    """Who watches a job. `line` gets each whole line of its stdout as it comes; `say` where the job is: in a queue, on
    which node, and that it left it."""

    line: Callable[[bytes], None] = _nothing
    say: Callable[[str], None] = _nothing


class Runner(Protocol):
    """Runs jobs of one image in one place.

    `image`: the name by digest that the place's engine knows it by, for the Job; empty where there is none.
    `nonce`: of the job that it wants, where that is one that was begun before; None: a new one.
    """

    @property
    def image(self) -> str: ...
    @property
    def nonce(self) -> str | None: ...

    def run(self, job: Job, watch: Watch) -> RawOutput:
        """Run the job to its end. Nothing of it stays where it ran, also after an interruption.

        RawOutput's `where` says where it ran, for the evidence, unless that is this machine. Raises RunnerError where
        it came to no end of its own, NotProved where there is no such GPU, and EngineError or NetworkError where the
        image could not be had or started.
        """
        ...


@runtime_checkable
class Scheduled(Runner, Protocol):
    """A runner that hands the job to a scheduler, as text or objects that can be shown."""

    def script(self, job: Job, *, brief: bool = False) -> str:
        """What the scheduler would be given; `brief`: without what no person reads. Nothing is submitted."""
        ...
