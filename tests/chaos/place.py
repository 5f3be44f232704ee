"""Where a campaign happens: a project, its folders, its engine, and envbuild as a process in all of that."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from e2e.engines import OwnEngine
from e2e.support import CHECKOUT, Project, Result, Running, machine_cache, python_path

from envbuild import fetching
from envbuild.image import dockerfile
from envbuild.making import Options
from envbuild.plan import lock
from envbuild.plan.lock import Lock
from envbuild.steps import Session

NAME = "chaos"
VARIANTS = ("a", "b")
HOOKS = Path(__file__).parent / "hooks"
_STORES = ("wheels", "debs", "bases")
PATIENCE = 900.0  # seconds for one run; a run that takes longer hangs


@dataclass
class Place:
    """`rendered`: lock id -> Dockerfile of every lock that was seen; `images`: variant -> image id, once made."""

    root: Path
    project: Project
    engine: OwnEngine
    rendered: dict[str, str] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    @property
    def links(self) -> Path:
        """Every wheel of the lock, as a folder for --find-links."""
        return self.root / "links"

    @property
    def evidence(self) -> Path:
        return self.project.state / "envbuild" / "evidence"

    @property
    def records(self) -> Path:
        return self.project.state / "envbuild" / "builds"

    @property
    def lock_file(self) -> Path:
        return self.project.lock(NAME)

    def want(self, variant: str) -> None:
        """The profile as that variant has it: one value in its environment, so that a lock and an image are others."""
        selftest = {"level": "quick", "require": ["env.libs"]}
        self.project.write(NAME, extends="cpu", env={"CHAOS": variant}, selftest=selftest)

    def start(self, *arguments: str, at: str | None = None, trace: Path | None = None, **env: str) -> Running:
        """envbuild; `at`: the moment when it kills itself (hooks/sitecustomize.py)."""
        if at or trace:
            env |= {"PYTHONPATH": python_path(HOOKS)}
            env |= {"CHAOS_AT": at} if at else {}
            env |= {"CHAOS_TRACE": str(trace)} if trace else {}
        return self.project.start(*arguments, **env)

    def run(self, *arguments: str, at: str | None = None, trace: Path | None = None, **env: str) -> Result:
        """To its end. Raises AssertionError where it does not come in time."""
        return self.start(*arguments, at=at, trace=trace, **env).finish(PATIENCE)

    def make(self, variant: str, *options: str, trace: Path | None = None) -> Result:
        """A run that must verify the variant. Raises AssertionError where it does not, or verifies another image."""
        done = self.run("make", NAME, "--json", *options, trace=trace)
        assert done.code == 0, f"make ended with {done.code}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        made = done.document
        assert made["status"] == "verified", made
        image = made["image"]["id"]
        known = self.images.get(variant, image)
        self.images[variant] = image
        assert image == known, f"the lock of {variant} gave {image}, and before {known}"
        current = lock.read(self.lock_file)
        assert current
        self.rendered.setdefault(current.id, dockerfile.render(current, NAME))
        return done

    def processes(self) -> dict[int, str]:
        """Id -> command line of what still runs with this place's temporary folder: nobody else has it."""
        mark = f"TMPDIR={self.temporary}".encode()
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    told = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if told:  # one that has ended has none
                        found[int(entry.name)] = told
        return found


def stock() -> None:
    """Bring what the campaign's image is made of to this machine's stores, while there is a network."""
    session = Session("cpu", Options(locked=True), _Quiet())
    source = session.load()
    plan = session.resolve(source)
    fetching.image(plan, session.lock(source, plan), session.progress)


class _Quiet:
    def begin(self, step: str) -> None: ...
    def line(self, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def probe(self, told: object) -> None: ...
    def end(self, step: object) -> None: ...
    def abort(self) -> None: ...


@contextlib.contextmanager
def place(root: Path) -> Iterator[Place]:
    """A project whose stores are copies of this machine's, and which asks no index; an engine that runs.

    All of it is gone afterwards.
    """
    root.mkdir(parents=True)
    engine = OwnEngine(root / "engine", apart=False)  # in the campaign's own network
    made = Place(root, Project.create(root), engine)
    try:
        cpu = lock.read(CHECKOUT / "profiles" / "cpu.lock.yaml")
        assert cpu
        for folder in (made.temporary, made.links, root / "docker"):
            folder.mkdir()
        made.project = made.project.with_cache(root, *_STORES).with_env(
            DOCKER_HOST=engine.host, DOCKER_CONFIG=str(root / "docker"), TMPDIR=str(made.temporary),
            PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(made.links), UV_NO_CACHE="1",
            PIP_EXTRA_INDEX_URL="", UV_FIND_LINKS="",
        )  # fmt: skip
        shutil.rmtree(made.project.config)  # pip's settings are those above alone
        made.project.config.mkdir()
        _fill(made, cpu)
        shutil.copy(CHECKOUT / "profiles" / "cpu.lock.yaml", made.lock_file)
        made.want(VARIANTS[0])
        engine.start()
        yield made
    finally:
        for pid in made.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        engine.stop()
        shutil.rmtree(root, ignore_errors=True)


def _fill(made: Place, cpu: Lock) -> None:
    """The stores hold what the lock names and nothing else. Links: 400 MB are not copied."""
    for item in cpu.wheels:
        kept = Path(item.wheel.sha256) / item.wheel.file
        _link(machine_cache("wheels") / kept, made.project.cached("wheels") / kept)
        _link(machine_cache("wheels") / kept, made.links / item.wheel.file)
    for deb in cpu.base:
        kept = Path(deb.sha256) / deb.file
        if (machine_cache("debs") / kept).is_file():
            _link(machine_cache("debs") / kept, made.project.cached("debs") / kept)
    for file in machine_cache("bases").glob("*"):
        _link(file, made.project.cached("bases") / file.name)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)
