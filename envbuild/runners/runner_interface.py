"""The interface of all runners: a runner executes a job somewhere and returns its raw output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from envbuild.testrun.run_result import RawOutput
from envbuild.testrun.selftest_job import Job
from envbuild.util.errors import EnvbuildError


class RunnerError(EnvbuildError):
    """The job did not finish, for a reason that says nothing about the image: for example a node failed, a user
    cancelled the job, or its output was lost. The self-test has neither passed nor failed. `ending` names the
    reason."""

    code, kind = 6, "runner"

    def __init__(self, message: str, *, ending: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.ending = ending


def _nothing(event: object) -> None:
    """The default callback: it ignores its argument."""


@dataclass(frozen=True)
class Watch:
    """Callbacks that watch a job. `line` receives each complete line of the job's stdout as it arrives. `say` receives
    messages about the job's state, for example that it is queued or runs on a node."""

    line: Callable[[bytes], None] = _nothing
    say: Callable[[str], None] = _nothing


class Runner(Protocol):
    """Runs jobs in containers of one image, or in an environment of this machine.

    `image`: the image reference with digest, as the runner's engine knows it; empty if jobs run without an image.
    `nonce`: the nonce of the job to resume; None: use a new one.
    """

    @property
    def image(self) -> str: ...
    @property
    def nonce(self) -> str | None: ...

    def run(self, job: Job, watch: Watch) -> RawOutput:
        """Runs the job to its end. Nothing of the job remains where it ran, even after an interruption. Exceptions: on
        a cluster, a job may remain if its state is unknown, or if the terminal was closed and the job can be resumed.

        `where` in the result records where the job ran, for the evidence; it is None if the job ran on this machine.
        Raises RunnerError if the job did not finish, NotProved if the GPU is missing, and EngineError or NetworkError
        if the image could not be fetched or started.
        """
        ...


def runs_in_container(runner: Runner) -> bool:
    """Whether the runner runs its jobs in containers. Jobs without an image run on this machine without a container."""
    return bool(runner.image)


@runtime_checkable
class Scheduled(Runner, Protocol):
    """A runner that submits the job to a scheduler, as a script or manifests that can be shown. `max_input`: the
    largest input of a job, in bytes; None: unlimited."""

    @property
    def max_input(self) -> int | None: ...

    def script(self, job: Job, *, brief: bool = False) -> str:
        """Return the text that `run` would submit, without submitting it. `brief`: without the encoded self-test."""
        ...
