"""Runs `make` for several profiles. Each profile has its own envbuild processes, so that its failure does not stop the
others; all share envbuild's caches. The processes report their progress as events (progress_events.py).

Downloading, compiling extensions, writing layers and loading into the engine each run for one profile at a time: the
envbuild process holds a file lock (process_locks.py) for the step. Audits run while the next profile is built.
Self-tests wait until the CPU or the GPUs they need are free.
Reasons: docs/decisions/0013-several-profiles.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from envbuild.attest import keys_and_signatures
from envbuild.image.docker_engine import Engine
from envbuild.pipeline import cuda_line_selection_for_machine, preflight_report, preflight_steps
from envbuild.pipeline.image_stores.image_store import ImageStore
from envbuild.pipeline.image_stores.image_store_selection import find_image_store, require_image_store
from envbuild.pipeline.model import AS_CONFIGURED, Options
from envbuild.pipeline.progress_events import Event, Note, OutputLine, StepBegan, StepEnded, parse_event
from envbuild.pipeline.step_context import StepContext
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.testrun.selftest_job import RunRequest
from envbuild.util import process_locks
from envbuild.util.errors import EnvbuildError, SystemFault, UsageError
from envbuild.util.host_processes import LineListeners, Stop, run

# CPUs that one self-test on the CPU keeps busy: level standard is 47 s of work and takes 35 s on two processors.
_CPUS_EACH = 4 / 3
# The memory that the kernel keeps, in units of self-tests: a machine of 24 GiB reports 23.5 GiB, and must still run
# three self-tests of 8 GiB.
_KERNELS_SHARE = 0.1
# Exit codes, most severe first: an interruption, faults found in an image, failures of this machine or the network,
# errors that the user must fix, and last images that are only unverified.
_WORST_FIRST = (130, 5, 6, 7, 3, 8, 2, 4, 0)

Show = Callable[[str, Event], None]


@dataclass(frozen=True)
class BatchOptions:
    """The options common to all profiles. `gpus`: GPUs to distribute; if empty, one GPU self-test at a time uses all
    GPUs."""

    locked: bool = False
    no_cache: bool = False
    allow_unproved: bool = False
    requirements: Path | None = None
    builder: str | None = None
    gpus: tuple[str, ...] = ()
    accept_old: tuple[str, ...] = ()
    line: str | None = None
    driver: str | None = None
    every: bool = False  # all profiles are made, so that no name may select a different line


@dataclass(frozen=True)
class BatchOutcome:
    """The result of one profile: the exit code and the JSON document that `make --json` of that profile alone would
    have given. `cli_words`: the profile as written on a command line."""

    name: str
    code: int
    seconds: float
    document: Mapping[str, Any]
    cli_words: str

    @property
    def error(self) -> Mapping[str, Any] | None:
        return self.document.get("error")

    @property
    def state(self) -> str:
        return str(self.document.get("state", "failed"))


def worst_exit_code(codes: Sequence[int]) -> int:
    """Return the exit code of the whole run: the most severe one; an unknown code is the most severe."""
    return min(codes, key=lambda code: _WORST_FIRST.index(code) if code in _WORST_FIRST else -1)


class ResourcePool:
    """A pool of units, each used by one thread at a time."""

    def __init__(self, units: Sequence[str]) -> None:
        self._all = len(units)
        self._free = list(units)
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taking(self, count: int) -> Iterator[tuple[str, ...]]:
        """Take `count` units, or all if there are fewer; wait until they are free."""
        count = min(count, self._all)
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
        try:
            yield tuple(taken)
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()


@dataclass
class BatchRun:
    """Makes several profiles and distributes the resources they share."""

    wanted: BatchOptions
    show: Show
    builds: ResourcePool
    cpu_tests: ResourcePool
    gpus: ResourcePool
    environment: Mapping[str, str]  # environment variables for the processes that sign
    stop: Stop = field(default_factory=Stop)

    def make(self, name: str, loaded: LoadedProfile) -> BatchOutcome:
        """Build the profile, wait for free resources, then test it. Raises nothing that a profile can cause."""
        begin = time.monotonic()
        events = _ProfileEvents(loaded.name, self.show)
        with self.builds.taking(1):
            code, document = self._run("build", name, events, no_cache=self.wanted.no_cache)
        if code == 0:
            built = document
            with self._units_to_test(loaded) as gpus:
                code, document = self._run("make", name, events, gpus, allow_unproved=self.wanted.allow_unproved)
            document = {**document, "steps": _joined(built.get("steps", ()), document.get("steps", ()))}
            document |= {"notes": list(dict.fromkeys([*built.get("notes", ()), *document.get("notes", ())]))}
        return BatchOutcome(loaded.name, code, time.monotonic() - begin, document, loaded.known)

    @contextlib.contextmanager
    def _units_to_test(self, loaded: LoadedProfile) -> Iterator[tuple[str, ...]]:
        """Yield the GPUs that this self-test must use; an empty tuple if it may use all or needs none."""
        if not loaded.profile.gpus:
            with self.cpu_tests.taking(1):
                yield ()
            return
        with self.gpus.taking(loaded.profile.gpu_count) as gpus:
            yield gpus if self.wanted.gpus else ()

    def _run(
        self, verb: str, name: str, events: _ProfileEvents, gpus: Sequence[str] = (), **flags: bool
    ) -> tuple[int, dict[str, Any]]:
        wanted = self.wanted
        options = [f"--{flag.replace('_', '-')}" for flag, given in flags.items() if given]
        options += ["--locked"] if wanted.locked else []
        options += [f"--requirements={wanted.requirements}"] if wanted.requirements else []
        options += [f"--accept-old={package}" for package in wanted.accept_old]
        options += [f"--builder={wanted.builder}"] if wanted.builder else []
        options += [f"--gpus={','.join(gpus)}"] if gpus else []
        # -P: a module in the working directory cannot shadow one of ours
        argv = [sys.executable, "-P", "-m", "envbuild", verb, "--json", *options, "--", name]
        signs = self.environment if verb == "make" else {}
        env = {**signs, process_locks.PARALLEL: "1"}
        done = run(
            argv, env=env, listeners=LineListeners(stderr=events.add_output, events=events.add_line), stop=self.stop
        )
        document = _document(done.stdout)
        if document is None or (done.code and "error" not in document):
            last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), events.last)
            how = f"signal {-done.code}" if done.code < 0 else f"exit code {done.code}"
            return _refused(SystemFault(f"envbuild {verb} {name} ended with {how}", hint=last))
        return done.code, document


def _document(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class _ProfileEvents:
    """Shows the events of a profile's two processes. The second process repeats steps of the first, so each step is
    shown only once."""

    def __init__(self, name: str, show: Show) -> None:
        self._name, self._show = name, show
        self._ended: set[str] = set()
        self.last = "no output"

    def add_line(self, line: str) -> None:
        """Show an event, received as a line of JSON."""
        event = parse_event(line)
        if isinstance(event, StepEnded):
            if event.step.name in self._ended:
                return
            self._ended.add(event.step.name)
        if isinstance(event, StepBegan):
            self.last = f"the last step that began: {event.step}"
        elif isinstance(event, Note):
            self.last = event.text
        self._show(self._name, event)

    def add_output(self, line: str) -> None:
        """Show a line that the process wrote to stderr."""
        self._show(self._name, OutputLine(line))


def _joined(built: Sequence[Mapping[str, Any]], made: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    done = {step["name"] for step in built}
    return [*built, *(step for step in made if step["name"] not in done)]


def _refused(error: EnvbuildError) -> tuple[int, dict[str, Any]]:
    return error.code, {**error.partial, "error": error.document()}


def make_profiles(
    names: Sequence[str], wanted: BatchOptions, show: Show, done: Callable[[BatchOutcome], None]
) -> list[BatchOutcome]:
    """Make every profile; a failure does not stop the others. `show` receives a profile's name and an event; `done`
    receives each outcome when its profile ends. Both are called from several threads.

    An unknown name or an invalid profile is an outcome too. Raises EngineError if nothing can hold the images,
    FileError if the signing key cannot be used, and UsageError if its passphrase is not available, or if `wanted`
    names GPUs and no profile does.
    """
    context, request = StepContext(lambda event: None), RunRequest(gpus=wanted.gpus)
    images = require_image_store(find_image_store(context, AS_CONFIGURED, "all", request))
    found: dict[str, tuple[str, LoadedProfile]] = {}
    outcomes = []
    signs = False  # a self-test may run, whose evidence is signed if a key is configured
    for name in dict.fromkeys(names):
        try:
            name, reason = _with_line(name, wanted)
            loaded = profile_reader_and_overrides.load(name, wanted=wanted.requirements)
            if loaded.name not in found:
                signs |= _check_machine(images, loaded, wanted, reason, show)
            found.setdefault(loaded.name, (name, loaded))
        except EnvbuildError as error:
            code, document = _refused(error)
            outcomes.append(BatchOutcome(name, code, 0.0, document, quote(name)))
            done(outcomes[-1])
    if wanted.gpus and found and not any(loaded.profile.gpus for _, loaded in found.values()):
        raise UsageError("--gpus: none of these profiles names gpus", hint="they are tested on the CPU")
    environment = keys_and_signatures.for_children() if signs else {}
    batch_run = _batch_run(images, [loaded for _, loaded in found.values()], wanted, show, environment)

    def one(item: tuple[str, LoadedProfile]) -> BatchOutcome:
        outcome = batch_run.make(*item)
        done(outcome)
        return outcome

    with ThreadPoolExecutor(max(1, len(found))) as threads:
        try:
            return [*outcomes, *threads.map(one, found.values())]
        except BaseException:
            batch_run.stop()
            raise


def _with_line(name: str, wanted: BatchOptions) -> tuple[str, str]:
    """The name of the line to build, and the reason for it."""
    if wanted.every:
        return name, "the profile's full name"
    choice = cuda_line_selection_for_machine.line_or_name(
        name, line=wanted.line, driver=wanted.driver, locked=wanted.locked
    )
    return choice.line.profile, choice.reason


def _check_machine(images: ImageStore, loaded: LoadedProfile, wanted: BatchOptions, reason: str, show: Show) -> bool:
    """Show the preflight of a profile, and return whether its self-test may run. Raises NotProved if no proof is
    possible here, unless the options allow that. Errors of the profile or its lock are not raised here, because the
    profile's own process reports them."""
    options = Options(
        wanted.locked,
        wanted.no_cache,
        request=RunRequest(gpus=wanted.gpus),
        unproved=wanted.allow_unproved,
        line_reason=reason,
    )
    try:
        found = preflight_steps.examine(images, loaded, plan_resolver.resolve(loaded), options)
    except EnvbuildError:
        return True
    if found.proof != "proved":
        for line in preflight_report.preflight_lines(found):
            show(loaded.name, Note(line))
    if found.proof == "impossible" and not wanted.allow_unproved:
        raise preflight_steps.not_provable(loaded, found)
    return found.proof in ("possible", "elsewhere")


def _batch_run(
    images: ImageStore,
    profiles: Sequence[LoadedProfile],
    wanted: BatchOptions,
    show: Show,
    environment: Mapping[str, str],
) -> BatchRun:
    cpus = os.cpu_count() or 1 if images.registry else images.engine.cpus
    return BatchRun(
        wanted,
        show,
        builds=_pool(cpus),  # most builds wait: each step has a lock
        cpu_tests=_pool(cpus if images.registry else _cpu_tests_at_once(images.engine, profiles)),
        gpus=ResourcePool(wanted.gpus) if wanted.gpus else _pool(1),
        environment=environment,
    )


def _cpu_tests_at_once(engine: Engine, profiles: Sequence[LoadedProfile]) -> int:
    """How many self-tests on the CPU the engine's machine can run at once."""
    most = max((s.profile.selftest.memory_gb for s in profiles if not s.profile.gpus), default=1.0)
    held = engine.memory_bytes / (most * (1 << 30)) + _KERNELS_SHARE
    return min(int(engine.cpus / _CPUS_EACH), int(held))


def _pool(count: int) -> ResourcePool:
    return ResourcePool([str(number) for number in range(max(1, count))])
