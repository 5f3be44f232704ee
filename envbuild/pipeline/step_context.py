"""The context that the steps of one workflow share: progress, engine, signing key, durations of steps, and notes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, Generic, ParamSpec, TypeVar

from envbuild.attest import keys_and_signatures
from envbuild.attest.keys_and_signatures import Signer
from envbuild.image import buildx
from envbuild.image.docker_engine import Engine
from envbuild.pipeline.model import StepResult
from envbuild.pipeline.progress_events import Listener, Progress, Step

P = ParamSpec("P")
R = TypeVar("R", bound=Any)
T = TypeVar("T")
_LOG = logging.getLogger(__name__)


class StepContext:
    """The progress, the engine, the signing key, the finished steps and the notes of one workflow. `builder`: name of a
    buildx builder, if not the engine's default."""

    def __init__(self, listener: Listener, builder: str | None = None) -> None:
        self.progress = Progress(listener)
        self.steps: tuple[Step, ...] = ()
        self.notes: tuple[str, ...] = ()
        self._builder = builder

    @cached_property
    def engine(self) -> Engine:
        """The engine, connected to at the first use. Raises EngineError if the engine or the builder cannot be used."""
        found = Engine(builder=self._builder)
        found.require_bounds()
        buildx.require_builder(found)
        return found

    @cached_property
    def signer(self) -> Signer | None:
        """The key that signs evidence; None if none is configured. Loaded at the first use, which may prompt for a
        passphrase. Raises FileError if the key cannot be used, UsageError without a passphrase."""
        return keys_and_signatures.configured_signer()

    def require_signer(self) -> None:
        """Load the signing key now, to raise its errors before the long steps."""
        _ = self.signer

    def step(self, name: str, function: Callable[P, StepResult[T]], *inputs: P.args, **options: P.kwargs) -> T:
        """Run a step: call `function`, show and time it under `name`, and return the value of its result."""
        _LOG.info("step %s begins", name)
        self.progress.begin(name)
        begin = time.monotonic()
        try:
            result = function(*inputs, **options)
        except BaseException:
            self.progress.abort()
            raise
        done = Step(name, time.monotonic() - begin, result.cached, result.note)
        self.steps += (done,)
        _LOG.info("step %s: %s, %s", name, "nothing to do" if done.cached else f"{done.seconds:.2f} s", done.note)
        self.progress.end(done)
        return result.value

    def note(self, text: str) -> None:
        """Show a note now and include it in the result document."""
        self.progress.say(text)
        self.notes += (text,)


class PartialResult(Generic[R]):
    """The result of a workflow that is still running. `value`: a frozen dataclass with the results that are known so
    far. The functions of the workflow replace its fields one after the other; steps do not receive it."""

    def __init__(self, value: R) -> None:
        self.value = value

    def update(self, **fields: Any) -> None:
        self.value = replace(self.value, **fields)

    def document(self) -> object:
        return self.value.document()
