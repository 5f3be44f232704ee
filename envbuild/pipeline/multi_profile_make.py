"""`make` of several profiles: each is an envbuild of its own, so that none stops another; all share BuildKit's cache.

Builds on one base take turns at the engine, by a lock that every envbuild takes; audits run beside the next build, and
self-tests take turns at what they need of the machine. Why: docs/decisions/0013-several-profiles.md.
"""

from __future__ import annotations

import contextlib
import json
import re
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
from envbuild.pipeline import runner_selection
from envbuild.profile.loaded_profile import Source
from envbuild.resolve import profile_reader_and_overrides
from envbuild.util import process_locks
from envbuild.util.errors import EnvbuildError, SystemFault, UsageError
from envbuild.util.host_processes import Stop, run

# What a self-test on the CPU keeps busy: level standard is 47 s of work, and takes 35 s on two processors.
_CPUS_EACH = 4 / 3
# What a machine is short of its nominal memory, in self-tests: one of 24 GiB says 23.5, and is to hold three of 8.
_KERNELS_SHARE = 0.1
# What was found wrong in an image, then what could not be done here, what is yours to mend, what is only unproved.
_WORST_FIRST = (130, 5, 6, 7, 3, 8, 2, 4, 0)
# A step that ended, as cli/console.py tells it: its name, and its seconds or that it is up to date.
_STEP = re.compile(r"  (\S[^:]{0,12}?) +(up to date|[0-9.]+ s)  ")

Say = Callable[[str, str], None]


@dataclass(frozen=True)
class BatchItem:
    """What every profile is made with. `gpus`: cards to hand out; without them a GPU's self-test has all, alone."""

    locked: bool = False
    no_cache: bool = False
    allow_unproved: bool = False
    requirements: Path | None = None
    builder: str | None = None
    gpus: tuple[str, ...] = ()
    accept_old: tuple[str, ...] = ()


@dataclass(frozen=True)
class BatchOutcome:
    """How one profile ended: the exit code and the document that `make --json` of it alone would have given. `asked`:
    how a command line asks for it."""

    name: str
    code: int
    seconds: float
    document: Mapping[str, Any]
    asked: str

    @property
    def error(self) -> Mapping[str, Any] | None:
        return self.document.get("error")

    @property
    def status(self) -> str:
        return str(self.document.get("status", "failed"))


def worst_exit_code(codes: Sequence[int]) -> int:
    """The exit code of all: a code that is not known is worse than any."""
    return min(codes, key=lambda code: _WORST_FIRST.index(code) if code in _WORST_FIRST else -1)


class ResourcePool:
    """Units of something, each in one pair of hands at a time."""

    def __init__(self, units: Sequence[str]) -> None:
        self._all = len(units)
        self._free = list(units)
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taking(self, count: int) -> Iterator[tuple[str, ...]]:
        """`count` of them, or all where there are fewer; waits until they are free."""
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
    """The profiles that are made, and what they take turns at."""

    wanted: BatchItem
    say: Say
    builds: ResourcePool
    tests: ResourcePool  # on the CPU
    cards: ResourcePool
    environment: Mapping[str, str]  # of those that sign
    stop: Stop = field(default_factory=Stop)

    def make(self, name: str, source: Source) -> BatchOutcome:
        """Build, wait for a turn, prove. Raises nothing that a profile can cause."""
        begin = time.monotonic()
        told = _Told(source.name, self.say)
        with self.builds.taking(1):
            code, document = self._run("build", name, told, no_cache=self.wanted.no_cache)
        if code == 0:
            built = document
            with self._turn(source) as gpus:
                code, document = self._run("make", name, told, gpus, allow_unproved=self.wanted.allow_unproved)
            document = {**document, "steps": _joined(built.get("steps", ()), document.get("steps", ()))}
            document |= {"notes": list(dict.fromkeys([*built.get("notes", ()), *document.get("notes", ())]))}
        return BatchOutcome(source.name, code, time.monotonic() - begin, document, source.known)

    @contextlib.contextmanager
    def _turn(self, source: Source) -> Iterator[tuple[str, ...]]:
        """The cards that this self-test is to use; none are named where it may use all, or needs none."""
        if not source.profile.gpus:
            with self.tests.taking(1):
                yield ()
            return
        with self.cards.taking(source.profile.gpu_count) as cards:
            yield cards if self.wanted.gpus else ()

    def _run(
        self, verb: str, name: str, told: _Told, gpus: Sequence[str] = (), **flags: bool
    ) -> tuple[int, dict[str, Any]]:
        wanted = self.wanted
        options = [f"--{flag.replace('_', '-')}" for flag, given in flags.items() if given]
        options += ["--locked"] if wanted.locked else []
        options += [f"--requirements={wanted.requirements}"] if wanted.requirements else []
        options += [f"--accept-old={package}" for package in wanted.accept_old]
        options += [f"--builder={wanted.builder}"] if wanted.builder else []
        options += [f"--gpus={','.join(gpus)}"] if gpus else []
        # -P: no module of the working folder is taken for one of ours
        argv = [sys.executable, "-P", "-m", "envbuild", verb, "--json", *options, "--", name]
        signs = self.environment if verb == "make" else {}
        done = run(argv, env={**signs, process_locks.BESIDE: "1"}, on_line=told, stop=self.stop)
        document = _document(done.stdout)
        if document is None or (done.code and "error" not in document):
            last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it said nothing")
            how = f"signal {-done.code}" if done.code < 0 else f"exit code {done.code}"
            return _refused(SystemFault(f"envbuild {verb} {name} ended with {how}", hint=last))
        return done.code, document


def _document(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class _Told:
    """What a profile's two processes say, each step once: the second repeats those that are up to date."""

    def __init__(self, name: str, say: Say) -> None:
        self._name, self._say = name, say
        self._steps: set[str] = set()

    def __call__(self, line: str) -> None:
        step = _STEP.match(line)
        if step is None or step[1] not in self._steps:
            self._say(self._name, line)
        if step:
            self._steps.add(step[1])


def _joined(built: Sequence[Mapping[str, Any]], made: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    done = {step["name"] for step in built}
    return [*built, *(step for step in made if step["name"] not in done)]


def _refused(error: EnvbuildError) -> tuple[int, dict[str, Any]]:
    return error.code, {**error.partial, "error": error.document()}


def make_profiles(
    names: Sequence[str], wanted: BatchItem, say: Say, done: Callable[[BatchOutcome], None]
) -> list[BatchOutcome]:
    """Make every profile; one that fails stops no other. `say` gets a profile's name and what it says, `done` each
    outcome as it comes; both from several threads.

    A name that is no profile's, and a profile that is not valid, are outcomes too. Raises EngineError where no engine
    answers, UsageError where the signing key cannot be used.
    """
    engine = Engine()
    found: dict[str, tuple[str, Source]] = {}
    outcomes = []
    for name in dict.fromkeys(names):
        try:
            source = profile_reader_and_overrides.load(name, wanted=wanted.requirements)
            if not wanted.allow_unproved:
                runner_selection.require_cards(source, wanted.gpus)
            found.setdefault(source.name, (name, source))
        except EnvbuildError as error:
            code, document = _refused(error)
            outcomes.append(BatchOutcome(name, code, 0.0, document, quote(name)))
            done(outcomes[-1])
    if wanted.gpus and found and not any(source.profile.gpus for _, source in found.values()):
        raise UsageError("--gpus: none of these profiles names gpus", hint="they are tested on the CPU")
    batch_run = _batch_run(engine, [source for _, source in found.values()], wanted, say)

    def one(item: tuple[str, Source]) -> BatchOutcome:
        outcome = batch_run.make(*item)
        done(outcome)
        return outcome

    with ThreadPoolExecutor(max(1, len(found))) as threads:
        try:
            return [*outcomes, *threads.map(one, found.values())]
        except BaseException:
            batch_run.stop()
            raise


def _batch_run(engine: Engine, profiles: Sequence[Source], wanted: BatchItem, say: Say) -> BatchRun:
    cpus, memory = int(engine.info.get("NCPU") or 1), int(engine.info.get("MemTotal") or 0)
    most = max((s.profile.selftest.memory_gb for s in profiles if not s.profile.gpus), default=1.0)
    held = memory / (most * (1 << 30)) + _KERNELS_SHARE
    return BatchRun(
        wanted,
        say,
        builds=_pool(cpus),  # most of them wait for their turn at the engine
        tests=_pool(min(int(cpus / _CPUS_EACH), int(held))),
        cards=ResourcePool(wanted.gpus) if wanted.gpus else _pool(1),
        environment=keys_and_signatures.for_children(),
    )


def _pool(count: int) -> ResourcePool:
    return ResourcePool([str(number) for number in range(max(1, count))])
