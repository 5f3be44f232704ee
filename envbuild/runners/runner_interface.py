"""The interface of all runners: a runner executes a job somewhere and returns its raw output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from envbuild.testrun.run_result import RawOutput
from envbuild.testrun.selftest_job import Job
from envbuild.util.errors import EnvbuildError


class RunnerError(EnvbuildError):
    """The job did not finish, for a reason that says nothing about the image: a node failed, a user cancelled it, its
    output was lost. The self-test has neither passed nor failed; `ending` names the reason."""

    code, kind = 6, "runner"

    def __init__(self, message: str, *, ending: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.ending = ending


def _nothing(event: object) -> None:
    """The callback of a caller that does not watch the job."""


@dataclass(frozen=True)
class Watch:
    """Callbacks that watch a job. `line` gets each whole line of its stdout as it arrives. `say` gets the job's state:
    it is queued, it runs on a node, it has ended."""

    line: Callable[[bytes], None] = _nothing
    say: Callable[[str], None] = _nothing


class Runner(Protocol):
    """Runs jobs of one image, on this machine or in a cluster.

    `image`: the image reference with digest, as the runner's engine knows it; empty if the job has no image. `nonce`:
    the nonce of a job that was submitted before and is resumed; None: use a new one.
    """

    @property
    def image(self) -> str: ...
    @property
    def nonce(self) -> str | None: ...

    def run(self, job: Job, watch: Watch) -> RawOutput:
        """Runs the job to its end. Nothing of it remains where it ran, even after an interruption.

        RawOutput's `where` records where the job ran, for the evidence, unless it ran on this machine. Raises
        RunnerError if the job did not finish, NotProved if the GPU is missing, and EngineError or NetworkError if the
        image could not be fetched or started.
        """
        ...


def runs_in_container(runner: Runner) -> bool:
    """Whether the runner confines a job to a container; a job without an image runs unconfined on this machine."""
    return bool(runner.image)


@runtime_checkable
class Scheduled(Runner, Protocol):
    """A runner that submits the job to a scheduler, as text or objects that can be shown."""

    def script(self, job: Job, *, brief: bool = False) -> str:
        """The text that would be submitted; `brief`: without the encoded self-test. It submits nothing."""
        ...
