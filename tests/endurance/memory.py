"""Memory runs out in a step of the build, in the audit or in a probe: the error names the limit."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from e2e.engines import own_engine
from e2e.support import CHECKOUT, Project, Result, until

from endurance.full import REQUIRED

GROUP = Path("/sys/fs/cgroup/memory")
# Uses more memory than the container may; the pages are written, so that they are really allocated.
HOG = "step('hog')\nheld = []\nwhile True:\n    held.append(bytearray(b'x' * (64 << 20)))\n"


@dataclass(frozen=True)
class Round:
    """The result of one round: `limit` in words, the exit code, the message, and the violations found."""

    what: str
    limit: str
    code: int
    message: str
    faults: tuple[str, ...]


def limitable() -> str | None:
    """Return why the engine's containers cannot be limited together here; None if they can be limited."""
    return None if (GROUP / "memory.limit_in_bytes").is_file() else "no cgroup v1 with the controller memory"


@contextlib.contextmanager
def group(name: str) -> Iterator[Path]:
    """Create a cgroup for all containers of an engine, including those of BuildKit."""
    made = GROUP / name
    made.mkdir(exist_ok=True)
    try:
        yield made
    finally:
        for inner in sorted((path for path in made.rglob("*") if path.is_dir()), reverse=True):
            inner.rmdir()
        until("an empty cgroup", lambda: _removed(made), 10)


def _removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.is_dir()


def _limit(made: Path, size: int | None) -> None:
    (made / "memory.limit_in_bytes").write_text(str(size if size else -1), encoding="ascii")


def run(folder: Path, say: Callable[[Round], None]) -> list[Round]:
    """Run `make` on a private engine: with too little memory for all its containers together, twice (see `limitable`);
    with enough; and with a profile whose own script uses more than the container may."""
    rounds: list[Round] = []
    with group("envbuild-endurance") as made, own_engine(folder / "data", cgroup_parent=f"/{made.name}") as own:
        project = _project(folder, own.host, "no-memory")

        def make(what: str, limit: str, code: int, *words: str) -> None:
            done = project.start("make", "no-memory", "--json").finish(600)
            rounds.append(_judged(what, limit, done, code, words))
            say(rounds[-1])

        _limit(made, 12 << 20)
        make("a step of the build", "12 MiB", 6, "ran out of memory", "GB in all")
        _limit(made, 64 << 20)
        audit = "the audit's container is limited to"
        make("the audit, which imports torch", "64 MiB", 5, "out of memory, or over a memory limit", audit)
        _limit(made, None)
        make("nobody", "none", 0)
        script = {"require": [*REQUIRED, "own.script"], "memory_gb": 1, "script": "hog.py"}
        project.change("no-memory", selftest={"level": "quick", **script})
        (project.folder / "profiles" / "hog.py").write_text(HOG, encoding="utf-8")
        make("a probe of the self-test", "1 GiB", 5, "out of memory", "is limited to 1 GiB: selftest: memory_gb")
    return rounds


def _project(folder: Path, host: str, name: str) -> Project:
    project = Project.create(folder / name).with_cache(folder / name).with_env(DOCKER_HOST=host)
    project.write(name, extends="cpu", selftest={"level": "quick", "require": REQUIRED})
    shutil.copy(CHECKOUT / "profiles" / "cpu.lock.yaml", project.lock(name))
    return project


def _judged(what: str, limit: str, done: Result, code: int, words: tuple[str, ...]) -> Round:
    message = f"{done.error['message']}; {done.error['hint']}" if done.code else ""
    faults = [f"exit code {done.code}, not {code}"] if done.code != code else []
    faults += [f"not in the message: {word}" for word in words if word not in message]
    faults += ["a traceback"] if "Traceback" in done.stderr else []
    wanted = [line for line in message.replace("; ", "\n").splitlines() if any(word in line for word in words)]
    return Round(what, limit, done.code, " / ".join(dict.fromkeys(wanted)), tuple(faults))
