"""Several processes make the same few profiles while these profiles change, and two users share one engine.

What must hold: every make ends, and its image is verified; every self-test that passed left its evidence; the tag
`verified` names the image that the evidence of the user who made it verifies; no file and no container is left.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.support import CHECKOUT, Project, Result, docker, machine_cache

from endurance.full import REQUIRED
from envbuild.util.atomic_files import write_atomically

LONGEST = 900.0  # seconds of one make: one that takes longer hangs


@dataclass
class Crowd:
    """`makes`: documents of makes that ended with 0; `refused`: documents of makes whose self-test failed, for example
    because the machine is so busy that a step does not end within its time limit; `faults`: the violations found."""

    processes: int
    profiles: int
    seconds: float = 0.0
    makes: list[Mapping[str, Any]] = field(default_factory=list)
    refused: list[Mapping[str, Any]] = field(default_factory=list)
    waits: int = 0
    slowest: float = 0.0
    faults: list[str] = field(default_factory=list)

    @property
    def tested(self) -> int:
        """Makes that ran the self-test, each of which must have left evidence, whatever its result."""
        ended = [*self.makes, *self.refused]
        return sum(not step["cached"] for made in ended for step in made["steps"] if step["name"] == "evidence")


def crowd(folder: Path, host: str, run_id: str, processes: int, profiles: int, seconds: float) -> Crowd:
    """Run this many processes at once. Each process repeatedly makes one of the profiles, and sometimes changes the
    profile. `host` empty: the engine that docker finds by itself."""
    project = Project.create(folder / "crowd")
    project = project.with_env(DOCKER_HOST=host) if host else project
    names = [f"crowd-{number}-{run_id}" for number in range(profiles)]
    for name in names:
        project.write(name, extends="cpu", env={"ROUND": "0"}, selftest={"level": "quick", "require": REQUIRED})
        shutil.copy(CHECKOUT / "profiles" / "cpu.lock.yaml", project.lock(name))
    found, lock, ended = Crowd(processes, profiles), threading.Lock(), threading.Event()
    begin = time.monotonic()

    def work(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() - begin < seconds and not ended.is_set():
            name = names[number % profiles]
            if chance.random() < 0.5:  # as an editor does
                write_atomically(project.profile(name), json.dumps({
                    "extends": "cpu", "env": {"ROUND": str(chance.randrange(1000))},
                    "selftest": {"level": "quick", "require": REQUIRED}}))  # fmt: skip
            try:
                done = project.start("make", name, "--json").finish(LONGEST)
            except AssertionError as error:
                with lock:
                    found.faults.append(f"{name}: {error}")
                return
            with lock:
                _take(found, name, done)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(processes)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:  # after an interruption, no process may continue in a folder that is removed
        ended.set()
        for thread in threads:
            thread.join()
    found.seconds = time.monotonic() - begin
    found.faults += _after(project, names, found.tested)
    remove(host, names)
    return found


def _take(found: Crowd, name: str, done: Result) -> None:
    found.slowest = max(found.slowest, done.seconds)
    found.waits += "waiting for it" in done.stderr
    if "Traceback" not in done.stderr and done.code == 5 and "the self-test of" in done.error["message"]:
        found.refused.append(done.document)
        if done.document["state"] == "verified":
            found.faults.append(f"{name}: verified, though its self-test failed")
    elif done.code or "Traceback" in done.stderr:
        found.faults.append(f"{name}: {done.code} {done.stderr.strip()[-400:]}{done.stdout.strip()[-400:]}")
    elif done.document["state"] != "verified":
        found.faults.append(f"{name}: exit code 0, {done.document['status']}")
    else:
        found.makes.append(done.document)
        evidence = Path(done.document["evidence"][0]["statement"])
        if not evidence.is_file():
            found.faults.append(f"{name}: its evidence {evidence} is gone")


def _after(project: Project, names: Sequence[str], tested: int) -> list[str]:
    """Return the faults that are found after all processes have ended."""
    faults = []
    statements = project.statements()
    if len(statements) != tested:
        faults.append(f"{tested} self-tests ended, {len(statements)} left evidence")
    for name in names:
        last = project.run("make", name, "--json")
        if last.code:
            faults.append(f"{name}: a last make ended with {last.code}: {last.stderr.strip()[-300:]}")
        status = project.run("status", name, "--json")
        if status.code:
            faults.append(f"{name}: {status.stdout}")
    faults += [f"left: {path}" for path in project.half_written() if path.name != ".gitignore"]
    faults += [f"left: container {row}" for row in containers(project.extra.get("DOCKER_HOST", ""), "crowd")]
    return faults


def _engine(host: str) -> dict[str, str]:
    """Return the engine's address; empty: the one that docker finds by itself."""
    return {"DOCKER_HOST": host} if host else {}


def containers(host: str, kind: str) -> list[str]:
    """Return the containers of images whose name contains `kind`; other containers may belong to another process."""
    rows = docker("ps", "--all", "--format", "{{.ID}} {{.Image}} {{.Names}}", env=_engine(host)).splitlines()
    return [row for row in rows if kind in row]


def remove(host: str, names: Sequence[str]) -> None:
    for name in names:
        arguments = ("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", f"envbuild/{name}")
        listed = docker(*arguments, env=_engine(host)).split()
        if listed:
            docker("image", "rm", "--force", *listed, env=_engine(host))
        shutil.rmtree(machine_cache("contexts") / name, ignore_errors=True)


# two users


@dataclass(frozen=True)
class User:
    """A user with their own home, cache and state; `uid` 0 is the user who runs this. `python`: one that this user may
    run, with envbuild and its dependencies on its path."""

    uid: int
    home: Path
    project: Path
    python: str = sys.executable

    def command(self, group: int) -> list[str]:
        own = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", f"--groups={group}", "--inh-caps=-all"]
        return [*(own if self.uid else []), self.python]

    def environment(self, host: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        home = {f"XDG_{kind}_HOME": str(self.home / kind.lower()) for kind in ("CACHE", "STATE", "CONFIG")}
        modules = os.pathsep.join([str(CHECKOUT), sysconfig.get_path("purelib")])
        return {**kept, **home, "PATH": path, "HOME": str(self.home), "DOCKER_HOST": host, "PYTHONPATH": modules}


_RUNS = "import subprocess, sys, envbuild.cli.entry, docker; sys.exit(subprocess.call([sys.executable, '-c', '']))"


def python_for(uid: int) -> str | None:
    """Return a Python of this version that the other user may run: the Python that runs this campaign may be in a home
    folder that other users cannot read."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in filter(None, (sys.executable, shutil.which(version, path="/usr/bin:/usr/local/bin"))):
        one = User(uid, Path("/"), Path("/"), python)
        done = subprocess.run([*one.command(uid), "-c", _RUNS], cwd="/", capture_output=True, env=one.environment(""))
        if done.returncode == 0:
            return python
    return None


def may_share(uid: int) -> str | None:
    """Return why another user cannot run this envbuild here; None if another user can."""
    if os.geteuid() or not shutil.which("setpriv"):
        return "only root can be two users, with setpriv"
    return None if python_for(uid) else "another user may run no Python that has what envbuild needs"


def user(folder: Path, uid: int, cache: Path) -> User:
    """Create a user with a copy of the cached wheels, packages and bases, so that nothing is downloaded and no base is
    built again."""
    home = folder / f"user-{uid}"
    folder.chmod(0o711)
    made = User(uid, home, home / "project", (python_for(uid) if uid else None) or sys.executable)
    (made.project / "profiles").mkdir(parents=True)
    for kind in ("wheels", "debs", "bases"):
        shutil.copytree(cache / kind, home / "cache" / "envbuild" / kind)
    (home / "config").mkdir()
    subprocess.run(["chown", "-R", f"{uid}:{uid}", home], check=True)
    return made


def two(folder: Path, host: str, run_id: str, users: Sequence[User], rounds: int, group: int) -> Crowd:
    """Let all users make a profile of the same name and a profile of their own at the same time, in alternating
    order."""
    found = Crowd(len(users), 2 * rounds)
    begin = time.monotonic()
    names = []
    for number in range(rounds):
        same = f"users-{number}-{run_id}"
        wanted = [(one, name) for one in users for name in (same, f"{same}-{one.uid}")]
        names += [name for _, name in wanted]
        running = [(one, name, _start(one, name, number, host, group)) for one, name in wanted]
        for _, name, process in running:
            try:
                out, err = process.communicate(timeout=LONGEST)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                found.faults.append(f"{name}: no end within {LONGEST:.0f} s")
            _take(found, name, Result(process.returncode, out, err, 0.0))
        found.faults += _status_faults(wanted, same, host, group)
    found.seconds = time.monotonic() - begin
    statements = [path for one in users for path in (one.home / "state").rglob("*.statement.json")]
    if len(statements) != found.tested:
        found.faults.append(f"{found.tested} self-tests ended, {len(statements)} left evidence")
    found.faults += [f"left: container {row}" for row in containers(host, "users-")]
    remove(host, sorted(set(names)))
    return found


def _start(one: User, name: str, number: int, host: str, group: int, *words: str) -> subprocess.Popen[str]:
    profile = one.project / "profiles" / f"{name}.yaml"
    if not words:
        profile.write_text(json.dumps({
            "extends": "cpu", "env": {"ROUND": f"users {number}"},
            "selftest": {"level": "quick", "require": REQUIRED}}), encoding="utf-8")  # fmt: skip
        shutil.copy(CHECKOUT / "profiles" / "cpu.lock.yaml", profile.with_suffix(".lock.yaml"))
        for path in (profile, profile.with_suffix(".lock.yaml")):
            os.chown(path, one.uid, one.uid)
    argv = [*one.command(group), "-m", "envbuild", *(words or ("make",)), name, "--json"]
    return subprocess.Popen(
        argv, cwd=one.project, env=one.environment(host), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _status_faults(wanted: Sequence[tuple[User, str]], same: str, host: str, group: int) -> list[str]:
    """Check `status` for each user: `status` must report an image as verified if this user's own evidence covers the
    image."""
    faults = []
    for one, name in wanted:
        process = _start(one, name, 0, host, group, "status")
        out, err = process.communicate(timeout=LONGEST)
        status = json.loads(out)
        if status["state"] != "verified":
            faults.append(f"{name}: {one.uid} sees {status['state']}: {status['reasons']} {err.strip()[-200:]}")
        elif name == same:
            tagged = json.loads(docker("inspect", f"envbuild/{name}:verified", env={"DOCKER_HOST": host}))[0]["Id"]
            if tagged != status["image"]:
                faults.append(f"{name}: {one.uid} sees {status['image']}, the tag names {tagged}")
    return faults
