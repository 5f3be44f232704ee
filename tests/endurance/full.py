"""Full disks: each disk that `make` writes to is filled at the begin of a step; for every other command that writes,
the project's disk is filled.

What must hold: the error names the disk with its free space, no file is half written, existing files are unchanged, no
container is left, and no image is called verified without evidence. After space is freed, the same command completes.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from e2e.engines import OwnEngine
from e2e.support import CHECKOUT, Project, Result, docker

from endurance.disks import Disk

PLACES = ("project", "state", "cache", "temporary", "engine")
# Disk -> the steps at whose start it is filled: those that write to it, and one or two that do not.
ROUNDS: Mapping[str, tuple[str, ...]] = {
    "project": ("resolve", "lock", "render", "evidence"),
    "state": ("load profile", "audit", "evidence", "tag"),
    "cache": ("load profile", "lock", "build", "audit"),
    "temporary": ("lock", "build", "load"),
    "engine": ("build", "load", "audit", "self-test", "tag"),
}
# For these steps the self-test is needed (`make`); for earlier ones `build` is enough, and faster.
PROVING = ("self-test", "evidence", "tag")
REQUIRED = ["env.libs", "gemm.crash"]
# What each command writes: a new file in the project, or an existing one.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "lock": ("lock", "{name}"),
    "init": ("init", "other", "--from", "cpu"),
    "keygen": ("keygen", "-o", "team"),
    "export requirements": ("export", "requirements", "{name}", "-o", "requirements.txt"),
    "export check": ("export", "check", "{name}", "-o", "check.py"),
    "export selftest": ("export", "selftest", "-o", "selftest.zip"),
    "show --html": ("show", "{name}", "--html", "page.html"),
    "doctor": ("doctor", "-o", "machine.json"),
    "export schema > file": ("export", "schema"),
}


@dataclass(frozen=True)
class Round:
    """The result of one round: the exit code with the disk full, the message, and the violations found."""

    place: str
    step: str
    code: int
    message: str
    faults: tuple[str, ...]
    ended: bool = False  # whether dockerd itself ended


class Site:
    """An engine, and a small disk. In each round, one of the places is on the small disk. Rounds of `commands` use no
    engine."""

    def __init__(self, folder: Path, engine: OwnEngine | None, disk: Disk, engine_disk: Disk) -> None:
        self.folder, self.engine, self.disk, self.engine_disk = folder, engine, disk, engine_disk
        self.host = engine.host if engine else "unix:///nowhere"
        self._numbers = itertools.count()
        self._before: Project | None = None

    def docker(self, *arguments: str) -> str:
        return docker(*arguments, env={"DOCKER_HOST": self.host})

    def project(self, place: str, *private: str) -> tuple[Project, str]:
        """Create a profile that no earlier round had, with the evidence and build records of another profile."""
        number = next(self._numbers)
        root = self.folder / f"round-{number}"
        on_disk = self.disk.folder / f"round-{number}"
        made = Project.create(root)
        roots = {kind: on_disk if place == kind else root for kind in PLACES}
        for kind in ("project", "state"):
            if place == kind:
                shutil.move(getattr(made, "folder" if kind == "project" else kind), roots[kind] / kind)
        made = replace(made, folder=roots["project"] / "project", state=roots["state"] / "state")
        temporary = roots["temporary"] / "tmp"
        temporary.mkdir(parents=True)
        own = {"DOCKER_HOST": self.host, "TMPDIR": str(temporary), "ENVBUILD_KEY_PASSPHRASE": "of no key that is kept"}
        made = made.with_cache(roots["cache"], *private).with_env(**own)
        name = f"full-{number}"
        made.write(name, extends="cpu", env={"ROUND": str(number)}, selftest={"level": "quick", "require": REQUIRED})
        shutil.copy(CHECKOUT / "profiles" / "cpu.lock.yaml", made.lock(name))
        if self._before:
            shutil.copytree(self._before.state, made.state, dirs_exist_ok=True)
        return made, name

    def begin(self) -> None:
        """Build one profile with enough space, so that the engine has the shared layers. Its state folder gets evidence
        that a release wrote; the rounds start with a copy of this folder, and must not change that evidence."""
        made, name = self.project("none")
        done = made.start("build", name, "--json").finish(900)
        assert done.code == 0, done.stderr
        shutil.copytree(CHECKOUT / "tests" / "golden" / "released" / "state", made.state, dirs_exist_ok=True)
        self._before = made

    def revive(self) -> bool:
        """Start the engine again if dockerd has ended, which may happen if its disk is full. Return whether dockerd had
        ended."""
        ended = self.engine is not None and not self.engine.alive()
        if self.engine and ended:
            self.engine.start()
        return ended

    def round(self, place: str, step: str) -> Round:
        """Fill the disk when `step` begins, watch `make` or `build`, then free the space and run the command again."""
        verb, status = ("make", "verified") if step in PROVING else ("build", "built")
        private = {"lock": ("debs",), "build": ("wheels", "debs", "bases")}.get(step, ())
        project, name = self.project(place, *(private if place == "cache" else ()))
        if step in ("resolve", "lock", "render"):
            project.lock(name).unlink()
        before = contents(project.state)
        sign = self.folder / "sign"
        running = project.hold(sign, f"{step} start", verb, name, "--json", seconds=900)
        disk = self.engine_disk if place == "engine" else self.disk
        disk.fill()
        sign.unlink()
        try:
            done = running.finish(600)
            faults = [*self._judged(done, project, status, before), *self._looked_at(project, name)]
        finally:
            disk.empty()
            ended = self.revive()
        tagged = self.docker("image", "ls", "--quiet", "--no-trunc", f"envbuild/{name}:verified").strip()
        faults += wrongly_tagged(done.code == 0 and status == "verified", tagged, project.statements())
        again = project.start(verb, name, "--json").finish(900)
        if (again.code, again.stdout and again.document.get("status")) != (0, status):
            faults.append(f"with room again: {again.code}, {_message(again)}")
        faults += [f"left: {path}" for path in _half_written(project)]
        faults += [f"left: container {one}" for one in self.docker("ps", "--all", "--quiet").split()]
        faults += [f"changed: {path}" for path in _changed(before, project.state)]
        self._remove(project, name)
        return Round(place, step, done.code, _message(done), tuple(faults), ended)

    def _judged(self, done: Result, project: Project, status: str, before: Mapping[Path, bytes]) -> Iterator[str]:
        if done.code == 0:  # this step writes nothing there
            if done.document["state"] != status:
                yield f"exit code 0, and it is {done.document['state']}"
        elif (done.code, done.error["kind"]) != (6, "disk"):
            yield f"reported as {done.code} {done.error['kind']}: {_message(done)}"
        elif " free" not in done.error["message"]:
            yield f"without figures: {done.error['message']}"
        if "Traceback" in done.stderr:
            yield "a traceback"
        yield from (f"half written: {path}" for path in _half_written(project))
        yield from (f"lost or changed: {path}" for path in _changed(before, project.state))

    def _looked_at(self, project: Project, name: str) -> Iterator[str]:
        """Commands that only read must work while the disk is full."""
        for words in (("status", name, "--json"), ("show", name, "--json")):
            done = project.run(*words)
            full = done.code and done.error["kind"] in ("disk", "system")
            if full or done.code not in (0, 4, 6, 8) or "Traceback" in done.stderr:  # 6: it is not built
                yield f"{words[0]} while it is full: {done.code} {_message(done)}"

    def command(self, what: str) -> Round:
        """Run a command that writes into the project with the project's disk full; then with space."""
        project, name = self.project("project")
        words = [word.format(name=name) for word in COMMANDS[what]]
        assert project.run("lock", name).code == 0
        if what == "lock":
            project.change(name, env={"ROUND": "new"})
        before = contents(project.folder)
        self.disk.fill()
        try:
            done = _redirected(project, words) if what.endswith("> file") else project.run(*words)
            faults = [] if done.code == 6 else [f"exit code {done.code}"]
            faults += [] if " free" in done.stderr else [f"without figures: {done.stderr.strip()[-300:]}"]
            faults += ["a traceback"] if "Traceback" in done.stderr else []
            faults += [f"lost or changed: {path}" for path in _changed(before, project.folder)]
            more = contents(project.folder).keys() - before.keys()
            faults += [f"half written: {path}" for path in more if not what.endswith("> file")]
        finally:
            self.disk.empty()
        again = _redirected(project, words) if what.endswith("> file") else project.run(*words)
        if again.code not in (0, 5 if what == "doctor" else 0):
            faults.append(f"with room again: {again.code} {again.stderr.strip()[-300:]}")
        self._remove(project, None)
        lines = done.stderr.strip().splitlines()
        return Round("project", what, done.code, next((line for line in lines if "error" in line), ""), tuple(faults))

    def _remove(self, project: Project, name: str | None) -> None:
        if name:
            tags = self.docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", f"envbuild/{name}").split()
            if tags:
                self.docker("image", "rm", "--force", *tags)
        for root in (self.folder, self.disk.folder):
            for path in root.glob("round-*"):
                if self._before is None or not self._before.state.is_relative_to(path):
                    shutil.rmtree(path)


def wrongly_tagged(verified: bool, image: str, statements: Sequence[Path]) -> list[str]:
    """Return what is wrong with the tag `verified`. The tag must name that image if the run ended as verified, else no
    image. An engine whose disk is full may report a failure although it has set the tag; if there is evidence, this is
    not a fault."""
    if image and image.removeprefix("sha256:") not in {path.parent.name for path in statements}:
        return ["a tag verified without evidence"]
    return ["no tag verified"] if verified and not image else []


def _redirected(project: Project, words: list[str]) -> Result:
    """Redirect stdout to a file of the project."""
    argv = ["sh", "-c", 'exec "$@" > out.txt', "sh", sys.executable, "-m", "envbuild", *words]
    done = subprocess.run(argv, cwd=project.folder, env=project.environment, capture_output=True, text=True)
    return Result(done.returncode, done.stdout, done.stderr, 0.0)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _changed(before: Mapping[Path, bytes], folder: Path) -> list[Path]:
    now = contents(folder)
    return [path for path, raw in before.items() if now.get(path) != raw]


def _half_written(project: Project) -> list[Path]:
    """Return files that only an interrupted write can have left, also in the stores, and all files in the temporary
    folder."""
    own = [path for path in project.half_written() if path.name != ".gitignore"]
    assert project.cache
    private = [kind for kind in (project.cache / "envbuild").iterdir() if not kind.is_symlink()]
    stores = [path for kind in private for path in kind.glob(".*")]
    temporary = list(Path(project.extra["TMPDIR"]).iterdir())  # only this process uses it
    empty = [path for path in (*contents(project.folder), *contents(project.state)) if path.suffix == ".json"]
    return [*own, *stores, *temporary, *(path for path in empty if not _is_json(path))]


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
        return True
    except ValueError:
        return False


def _message(done: Result) -> str:
    try:
        return " ".join(str(done.error["message"]).split()) if done.code else ""
    except (ValueError, KeyError):
        return done.stderr.strip()[-300:]


def steps(site: Site, only: Container[str], say: Callable[[Round], None]) -> list[Round]:
    """Run the requested rounds. Each round fills one disk when one step begins. `only`: PLACE/STEP of these rounds."""
    site.begin()
    wanted = [(place, step) for place, steps in ROUNDS.items() for step in steps if f"{place}/{step}" in only]
    return [_reported(_round(site, place, step), say) for place, step in wanted]


def every() -> list[str]:
    """Return PLACE/STEP of each round."""
    return [f"{place}/{step}" for place, steps in ROUNDS.items() for step in steps]


def _round(site: Site, place: str, step: str) -> Round:
    """Run a round. A round that does not end by itself is a fault, and the other rounds continue."""
    try:
        return site.round(place, step)
    except AssertionError as error:
        return Round(place, step, -1, "", (str(error)[-400:],))


def commands(site: Site, say: Callable[[Round], None]) -> list[Round]:
    """Run each command that writes to the project with the project's disk full. No engine is used."""
    return [_reported(site.command(what), say) for what in COMMANDS]


def _reported(one: Round, say: Callable[[Round], None]) -> Round:
    say(one)
    return one
