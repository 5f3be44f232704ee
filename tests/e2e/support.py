"""Shared by the end-to-end tests: envbuild as a process in a scratch project, and the engine through docker's
client."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import platformdirs
import yaml
from fork_server import ForkedProcess
from unit.documents import require_valid

import envbuild

from . import forked_envbuild
from .forked_envbuild import HOOKS

PACKAGE = Path(envbuild.__file__).parent
CHECKOUT = PACKAGE.parent
OWNER = "io.envbuild.owner"
OTHER_CUBLAS = "12.5.3.2"  # not the one that step-video pins
REQUIRED = ("env.libs", "gemm.crash", "gemm.exact")
# Characters that a shell, a Dockerfile or a template could interpret.
ODD = 'it\'s "quoted" $(touch /tmp/odd) $HOME `id` \\ {{ x }} # --flag'

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """A finished command."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    arguments: tuple[str, ...] = ()

    @property
    def document(self) -> dict[str, Any]:
        """The document of --json, checked against the schema of its command."""
        found: dict[str, Any] = json.loads(self.stdout)
        require_valid(self.arguments, found)
        return found

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.document["error"]
        return found

    @property
    def words(self) -> str:
        """The error as text: its message and hint."""
        return f"{self.error['message']}\n{self.error['hint']}"


def until(what: str, probe: Callable[[], T | None], seconds: float = 60) -> T:
    """The first truthy value of `probe`; fails naming `what` if none comes in time. After a probe that takes longer, a
    longer pause follows, because it starts processes."""
    end = time.monotonic() + seconds
    while True:
        begin = time.monotonic()
        found = probe()
        if found:
            return found
        if begin > end:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(min(max(0.02, 4 * (time.monotonic() - begin)), 0.5))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class Running:
    """A running command."""

    def __init__(self, argv: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        """Start a program. `python -m envbuild` is forked from a process that has imported envbuild, if possible."""
        self._begin = time.monotonic()
        words = list(argv)
        self._arguments = tuple(words[words.index("envbuild") + 1 :]) if "envbuild" in words else ()
        self._texts: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self.process: subprocess.Popen[str] | ForkedProcess
        if words[:3] == [sys.executable, "-m", "envbuild"] and forked_envbuild.possible(env):
            self.process = forked_envbuild.start(words[3:], cwd, env)
        else:
            self.process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                # a shell's background job ignores SIGINT, and its children inherit that
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        self._readers = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._texts]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        for line in getattr(self.process, name):
            self._texts[name].append(line)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stderr(self) -> str:
        return "".join(self._texts["stderr"])

    def says(self, text: str, seconds: float = 60) -> None:
        """Wait until the process has written `text` to stderr."""
        until(f"{text!r} on stderr", lambda: text in self.stderr or self._ended(text), seconds)

    def _ended(self, text: str) -> bool:
        if self.process.poll() is not None:
            self._readers[1].join()
            assert text in self.stderr, f"ended with {self.process.returncode} before: {text}\n{self.stderr}"
        return False

    def alive(self) -> bool:
        return self.process.poll() is None

    def interrupt(self) -> Result:
        self.process.send_signal(signal.SIGINT)
        return self.finish(30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def finish(self, seconds: float = 600) -> Result:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not done within {seconds:g} s\n{self.stderr}") from None
        took = time.monotonic() - self._begin
        for reader in self._readers:
            reader.join()
        return Result(code, "".join(self._texts["stdout"]), self.stderr, took, self._arguments)


@dataclass(frozen=True)
class Project:
    """A folder with profiles/ and dockerfiles/, and envbuild's own folders for it. `cache` None: this machine's
    cache."""

    folder: Path
    state: Path
    config: Path
    cache: Path | None = None
    extra: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def create(cls, root: Path) -> Project:
        made = cls(root / "project", root / "state", root / "config")
        for folder in (made.folder / "profiles", made.folder / "dockerfiles", made.state, made.config):
            folder.mkdir(parents=True)
        # pip and uv keep their configuration; envbuild has no settings
        own = Path(platformdirs.user_config_dir())
        for entry in own.iterdir() if own.is_dir() else ():
            if entry.name != "envbuild":
                (made.config / entry.name).symlink_to(entry)
        return made

    def copy(self, root: Path) -> Project:
        """Copy the project and its state, so that the copy can be damaged."""
        made = replace(self, folder=root / "project", state=root / "state", config=root / "config")
        for source, target in ((self.folder, made.folder), (self.state, made.state), (self.config, made.config)):
            shutil.copytree(source, target, symlinks=True)
        return made

    def with_cache(self, root: Path, *private: str) -> Project:
        """Give the project its own cache folder. Its parts are links to this machine's cache, except the `private`
        ones, which start empty."""
        cache = root / "cache"
        own = cache / "envbuild"
        own.mkdir(parents=True)
        for kind in ("wheels", "debs", "bases"):
            if kind in private:
                (own / kind).mkdir()
            else:
                (own / kind).symlink_to(machine_cache(kind))
        return replace(self, cache=cache)

    def use_apex_mirror(self) -> None:
        """Take apex from the repository in APEX_GIT, if this variable is set, and not from its public one."""
        if os.environ.get("APEX_GIT"):
            settings = self.config / "envbuild" / "config.yaml"
            settings.parent.mkdir()
            settings.write_text(f"git_mirror: {os.environ['APEX_GIT']}\n", encoding="utf-8")

    def with_env(self, **extra: str) -> Project:
        return replace(self, extra={**self.extra, **extra})

    def with_required_alone(self) -> Project:
        """Make its self-tests run only the probes that the profile requires: for tests of what is done with the
        result."""
        return self.with_env(**required_alone())

    def cached(self, kind: str) -> Path:
        return self.cache / "envbuild" / kind if self.cache else machine_cache(kind)

    def profile(self, name: str) -> Path:
        return self.folder / "profiles" / f"{name}.yaml"

    def lock(self, name: str) -> Path:
        return self.folder / "profiles" / f"{name}.lock.yaml"

    def dockerfile(self, name: str) -> Path:
        return self.folder / "dockerfiles" / f"{name}.Dockerfile"

    def write(self, name: str, **keys: Any) -> None:
        self.profile(name).write_text(yaml.safe_dump(keys, sort_keys=False), encoding="utf-8")

    def change(self, name: str, **keys: Any) -> None:
        before = yaml.safe_load(self.profile(name).read_text(encoding="utf-8"))
        self.write(name, **{**before, **keys})

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        folders = {"XDG_STATE_HOME": str(self.state), "XDG_CONFIG_HOME": str(self.config)}
        if self.cache:
            folders["XDG_CACHE_HOME"] = str(self.cache)
        return {**os.environ, "PATH": path, **folders, **self.extra}

    def start(self, *arguments: str, **env: str) -> Running:
        argv = [sys.executable, "-m", "envbuild", *arguments]
        return Running(argv, self.folder, {**self.environment, **env})

    def run(self, *arguments: str, **env: str) -> Result:
        return self.start(*arguments, **env).finish()

    def hold(self, sign: Path, moment: str, *arguments: str, seconds: float = 180) -> Running:
        """Start a command that stops at `moment` ("STEP start" or "STEP write"), and wait until the command stops, for
        at most `seconds`: builds of other workers may come before the build of this command."""
        running = self.start(*arguments, PYTHONPATH=python_path(HOOKS), E2E_HOLD=moment, E2E_HOLDING=str(sign))
        until(f"{moment}\n{running.stderr}", lambda: sign.exists() or not running.alive(), seconds)
        assert sign.exists(), f"ended before: {moment}\n{running.stderr}"
        return running

    def half_written(self) -> list[Path]:
        """Return files that only an interrupted write can have left."""
        return [path for root in (self.folder, self.state) for path in root.rglob(".*") if path.is_file()]

    def statements(self) -> list[Path]:
        return sorted((self.state / "envbuild" / "evidence").glob("*/*.statement.json"))


@dataclass(frozen=True)
class Proved:
    """A profile of a project that was made and verified; `document`: the JSON document of `make`."""

    project: Project
    name: str
    document: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.document["image"])

    @property
    def tag(self) -> str:
        """The tag that carries the lock's id."""
        return str(self.document["tags"][0])

    @property
    def verified(self) -> str:
        return f"envbuild/{self.name}:verified"

    def copy(self, root: Path) -> Proved:
        return replace(self, project=self.project.copy(root))

    def with_required_alone(self) -> Proved:
        return replace(self, project=self.project.with_required_alone())

    def records(self) -> list[Path]:
        """The build records of this image only: a bisection in the same project leaves records of other images."""
        short = self.id.removeprefix("sha256:")[:12]
        return sorted((self.project.state / "envbuild" / "builds").glob(f"*-{short}.json"))


def required_alone() -> dict[str, str]:
    """Return the variables that have the effect of Project.with_required_alone, for a process that starts envbuild
    itself."""
    return {"PYTHONPATH": python_path(HOOKS), "E2E_REQUIRED_ALONE": "1"}


def python_path(*folders: Path) -> str:
    """Return PYTHONPATH with these folders first."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def path_without(folder: Path, *programs: str) -> str:
    """Return a PATH with all programs of the present one except these; `folder` holds the links."""
    folder.mkdir()
    for place in map(Path, os.environ["PATH"].split(os.pathsep)):
        for file in place.iterdir() if place.is_dir() else ():
            link = folder / file.name
            if file.name not in programs and not link.is_symlink():
                link.symlink_to(file)
    return os.pathsep.join([str(Path(sys.executable).parent), str(folder)])


def machine_cache(kind: str) -> Path:
    folder = Path(platformdirs.user_cache_dir("envbuild")) / kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def command(
    *argv: str | Path, stdin: str | None = None, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Return stdout of a command that must succeed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [str(part) for part in argv],
        cwd=cwd,
        env={**os.environ, "PATH": path, **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=1200,  # the push of a GPU image packs 5.5 GB: three minutes, and more on a busy machine
    )
    assert done.returncode == 0, f"{' '.join(map(str, argv))}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def docker(*arguments: str | Path, stdin: str | None = None, env: Mapping[str, str] | None = None) -> str:
    return command("docker", *arguments, stdin=stdin, env=env)


def inspect(reference: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(docker("inspect", reference))[0]
    return found


def handle(reference: str) -> str | None:
    """Return the id of the image of that name in the engine; None if it does not exist."""
    listed = docker("image", "ls", "--no-trunc", "--format", "{{.ID}}", reference).split()
    return listed[0] if listed else None


def containers(pid: int) -> list[str]:
    """Return the ids of the containers that the envbuild with this process id started."""
    rows = docker("ps", "--all", "--no-trunc", "--format", f'{{{{.ID}}}} {{{{.Label "{OWNER}"}}}}').splitlines()
    return [row.split()[0] for row in rows if f":{pid}:" in row]


def burdened(folder: Path, secret: str) -> dict[str, str]:
    """Return an environment in which index, proxy, netrc and CA bundle contain a secret; nothing is downloaded in
    it."""
    netrc, authority = folder / "netrc", folder / "authority.pem"
    netrc.write_text(f"machine index.invalid login me password {secret}\n", encoding="utf-8")
    netrc.chmod(0o644)
    system = Path("/etc/ssl/certs/ca-certificates.crt")
    trusted = system.read_text(encoding="utf-8") if system.is_file() else ""
    authority.write_text(f"# {secret}\n{trusted}", encoding="utf-8")
    index = f"https://me:{secret}@index.invalid/simple"
    return {"PIP_INDEX_URL": index, "UV_DEFAULT_INDEX": index, "PIP_PROXY": f"http://me:{secret}@proxy.invalid:1",
            "NETRC": str(netrc), "PIP_CERT": str(authority), "SSL_CERT_FILE": str(authority)}  # fmt: skip


def readable(raw: bytes) -> Iterator[bytes]:
    """Return the bytes of a file, and everything inside it in base64, at any depth: statements, records, locks."""
    yield raw
    for inner in re.findall(rb'"(?:payload|content)": ?"([A-Za-z0-9+/=]+)"', raw):
        yield from readable(base64.b64decode(inner))


def holding(text: str | bytes, *folders: Path) -> list[Path]:
    """Return the files that contain a text. Layers (recognised by their size) are skipped, because they are
    compressed."""
    wanted = text.encode() if isinstance(text, str) else text
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    small = [path for path in files if path.stat().st_size < 50_000_000]
    return [path for path in small if any(wanted in part for part in readable(path.read_bytes()))]


def in_layers(reference: str, secrets_: list[bytes]) -> bool:
    """Whether a secret is in the engine's export of the image: its metadata and its uncompressed layers."""
    longest = max(map(len, secrets_))
    found, kept = False, b""
    with subprocess.Popen([shutil.which("docker") or "docker", "save", reference], stdout=subprocess.PIPE) as process:
        assert process.stdout
        while block := process.stdout.read(1 << 22):
            text = kept + block
            found = found or any(secret in text for secret in secrets_)
            kept = text[-longest:]
    assert process.returncode == 0
    return found


def recorded(statement: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the run record of a statement, and the description of where the self-test ran, which is stored next to
    it."""
    read = (statement.with_name(statement.name.replace(".statement.", f".{kind}.")) for kind in ("record", "where"))
    record, where = (json.loads(file.read_text(encoding="utf-8")) for file in read)
    return record, where
