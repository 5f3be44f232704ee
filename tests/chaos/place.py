"""The environment of a campaign: a project, its folders, its engine, and envbuild as a process in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from e2e.engines import OwnEngine
from e2e.support import Project, Result, Running, machine_cache, python_path

from chaos import listing
from chaos.products import CPU, VARIANTS, Product
from envbuild.image import container_definition_export
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock

NAME = "chaos"
HOOKS = Path(__file__).parent / "hooks"
_STORES = ("wheels", "debs", "bases")
PATIENCE = 900.0  # seconds for one run; a run that takes longer hangs


@dataclass
class Place:
    """`rendered`: lock id -> Dockerfile of every lock that was seen. `images`, `locks`: variant -> image id and the
    text of the lock, after the variant was made. `listings`: image id -> the contents of its layers, for the images
    that `look` was called for; only such an image may be replaced by a different image of the same lock. `heard`:
    stderr of the runs of a round; `others`: the images that replaced another one in the round.
    """

    root: Path
    project: Project
    engine: OwnEngine
    product: Product = CPU
    rendered: dict[str, str] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    locks: dict[str, str] = field(default_factory=dict)
    listings: dict[str, list[str]] = field(default_factory=dict)
    heard: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    @property
    def links(self) -> Path:
        """Return a folder with every wheel of the lock, for --find-links."""
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
        """Write the profile of that variant, which has its own lock and image."""
        self.project.write(NAME, extends=self.product.extends, **self.product.keys[variant])

    def start(self, *arguments: str, at: str | None = None, trace: Path | None = None, **env: str) -> Running:
        """Start envbuild; `at`: the moment when it kills itself (hooks/sitecustomize.py)."""
        if at or trace:
            env |= {"PYTHONPATH": python_path(HOOKS)}
            env |= {"CHAOS_AT": at} if at else {}
            env |= {"CHAOS_TRACE": str(trace)} if trace else {}
        return self.project.start(*arguments, **env)

    def run(self, *arguments: str, at: str | None = None, trace: Path | None = None, **env: str) -> Result:
        """Run envbuild to its end. Raises AssertionError if it does not end in time."""
        return self.start(*arguments, at=at, trace=trace, **env).finish(PATIENCE)

    def make(self, variant: str, *options: str, trace: Path | None = None) -> Result:
        """Run a command that must verify or build the variant. Raises AssertionError if it fails, or gives a different
        image."""
        verb = self.product.verb
        done = self.run(verb, NAME, "--json", *options, trace=trace)
        assert done.code == 0, f"{verb} ended with {done.code}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        made = done.document
        assert made["state"] == self.product.status, made
        image = made["image"]
        known = self.images.get(variant, image)
        self.images[variant] = image
        self.heard.append(done.stderr)
        if image != known:
            self._same_files(variant, known, image)
        current = lock_file.read(self.lock_file)
        assert current
        self.locks[variant] = self.lock_file.read_text(encoding="utf-8")
        self.rendered.setdefault(current.id, container_definition_export.standalone_dockerfile(current, NAME))
        return done

    def look(self, image: str) -> list[str]:
        if image not in self.listings:
            self.listings[image] = listing.of_image(self.engine.client(300), image, self.root)
        return self.listings[image]

    def _same_files(self, variant: str, known: str, image: str) -> None:
        """Accept a second image of one lock only if its layers contain the same files and a run reported the second
        image."""
        message = f"the lock of {variant} gave {image}, and before {known}"
        assert known in self.listings, message
        pairs = zip_longest(self.look(known), self.look(image))
        other = [number for number, (then, now) in enumerate(pairs, 1) if then != now]
        assert not other, f"{message}, which hold other files in layer {other[0]}"
        lines = "\n".join(self.heard).splitlines()
        assert any(known in line and image in line for line in lines), (
            f"{message}: the same files, and no run reported it"
        )
        self.others.append(image)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Restore the build records that the commands in this context delete or change."""
        kept = {file: file.read_bytes() for file in self.records.glob("*.json")}
        yield
        for file, content in kept.items():
            file.write_bytes(content)

    def processes(self) -> dict[int, str]:
        """Return id -> command line of processes that still use this place's own temporary folder."""
        mark = f"TMPDIR={self.temporary}".encode()
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if command:  # an ended process has no command line
                        found[int(entry.name)] = command
        return found


@contextlib.contextmanager
def place(root: Path, product: Product, locks: Iterable[Lock]) -> Iterator[Place]:
    """Yield a project that uses no index, with a running engine. Both are removed afterwards.

    `locks`: the stores contain exactly the files that these locks name, taken from this machine's stores
    (products.stock downloads them).
    """
    root.mkdir(parents=True)
    engine = OwnEngine(root / "engine", apart=False)  # in the campaign's own network
    made = Place(root, Project.create(root), engine, product)
    try:
        for folder in (made.temporary, made.links, root / "docker"):
            folder.mkdir()
        made.project = made.project.with_cache(root, *_STORES).with_env(
            DOCKER_HOST=engine.host, DOCKER_CONFIG=str(root / "docker"), TMPDIR=str(made.temporary),
            PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(made.links), UV_NO_CACHE="1",
            PIP_EXTRA_INDEX_URL="", UV_FIND_LINKS="",
        )  # fmt: skip
        shutil.rmtree(made.project.config)  # only the pip settings above apply
        made.project.config.mkdir()
        for one in locks:
            _fill(made, one)
        shutil.copy(product.lock_file, made.lock_file)
        made.want(VARIANTS[0])
        engine.start()
        yield made
    finally:
        for pid in made.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        engine.stop()
        shutil.rmtree(root, ignore_errors=True)


def _fill(made: Place, locked: Lock) -> None:
    """Fill the stores with exactly what the locks name. Files are linked: copying gigabytes would take too long."""
    for item in locked.wheels:
        kept = Path(item.wheel.sha256) / item.wheel.file
        _link(machine_cache("wheels") / kept, made.project.cached("wheels") / kept)
        _link(machine_cache("wheels") / kept, made.links / item.wheel.file)
    for deb in (*locked.base, *locked.apt):
        kept = Path(deb.sha256) / deb.file
        if (machine_cache("debs") / kept).is_file():
            _link(machine_cache("debs") / kept, made.project.cached("debs") / kept)
    for file in machine_cache("bases").glob("*"):
        _link(file, made.project.cached("bases") / file.name)


def _link(source: Path, target: Path) -> None:
    if target.exists():  # two locks share most files
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # on a different disk
        shutil.copy2(source, target)
