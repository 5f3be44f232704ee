"""Run `make` repeatedly on a separate engine, measure after each run, and check by the slopes whether any of the
measured values grows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from e2e.engines import OwnEngine
from e2e.support import CHECKOUT, Project, docker

from endurance.full import REQUIRED

PINS = ("3.4", "3.7", "3.10", "3.11")  # of idna: it is small, and nothing else in the image requires it


@dataclass(frozen=True)
class Seen:
    """The figures after one make. `seconds`: wall-clock time. `memory`: the largest memory of envbuild itself,
    `engine`: the memory of dockerd and its containerd, both in MiB. `files`: the file descriptors that dockerd and its
    containerd have open; `machine_files`: those of the whole machine. `images`, `containers`, `temporary`: the numbers
    of images, containers and temporary folders. `own`: the size of envbuild's folders, `data`: that of the engine's
    folder without `history`, BuildKit's records of builds; all in MB."""

    seconds: float
    memory: float
    engine: float
    files: int
    machine_files: int
    images: int
    containers: int
    temporary: int
    own: float
    data: float
    history: float


def unchanged(folder: Path, own: OwnEngine, number: int, level: str = "standard") -> Iterator[Seen]:
    """Make the profile cpu with nothing changed."""
    project, name = _project(folder / "unchanged", own.host, "soak-cpu", level)
    for _ in range(number):
        yield _made(project, name, own)


def changed(folder: Path, own: OwnEngine, number: int) -> Iterator[Seen]:
    """Make a profile with a small package whose pin changes each time, to the next of four versions; run `prune` after
    each make."""
    project, name = _project(folder / "changed", own.host, "soak-pin", "quick")
    for at in range(number):
        project.change(name, packages=["numpy", f"idna=={PINS[at % len(PINS)]}"])
        seen = _made(project, name, own)
        pruned = project.run("prune", "--images-only", "--json")
        assert pruned.code == 0, pruned.stdout
        yield seen


def _project(folder: Path, host: str, name: str, level: str) -> tuple[Project, str]:
    project = Project.create(folder).with_cache(folder).with_env(DOCKER_HOST=host)
    project.write(name, extends="cpu", selftest={"level": level, "require": REQUIRED})
    shutil.copy(CHECKOUT / "profiles" / "cpu.lock.yaml", project.lock(name))
    return project, name


def _made(project: Project, name: str, own: OwnEngine) -> Seen:
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "envbuild", "make", name, "--allow-unproved"], cwd=project.folder,
        env=project.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr
    stderr = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, stderr
    seconds = time.monotonic() - begin
    servers = own.processes("dockerd", "containerd")
    history = sum(map(_size, _history(own.data)))
    env = {"DOCKER_HOST": own.host}
    images = docker("image", "ls", "--all", "--quiet", env=env).split()
    return Seen(
        seconds=seconds,
        memory=used.ru_maxrss / 1024,
        engine=sum(map(_resident, servers)) / 2**20,
        files=sum(map(_open_files, servers)),
        machine_files=int(Path("/proc/sys/fs/file-nr").read_text(encoding="ascii").split()[0]),
        images=len(set(images)),
        containers=len(docker("ps", "--all", "--quiet", env=env).split()),
        temporary=len(list(Path("/tmp").glob("envbuild-tmp-*"))),
        own=sum(_size(root) for root in (project.folder, project.state, project.cache or project.state)) / 1e6,
        data=(_size(own.data) - history) / 1e6,
        history=history / 1e6,
    )


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def _history(data: Path) -> list[Path]:
    """Return the folders in which the engine's BuildKit keeps its build records, each with its log and trace."""
    return [path for path in (data / "buildkit" / "content", data / "buildkit" / "history.db") if path.exists()]


def _size(folder: Path) -> int:
    """Return the size on disk in bytes; links are not followed, and hard links count once."""
    done = subprocess.run(["du", "--summarize", "--block-size=1", folder], capture_output=True, text=True)
    return int(done.stdout.split()[0])


def slopes(rows: Sequence[Seen], settled: int) -> Mapping[str, float]:
    """Return the growth per make of each figure, by least squares over all makes after the first `settled`."""
    return {name: slope([asdict(row)[name] for row in rows[settled:]]) for name in asdict(rows[0])}


def slope(values: Sequence[float]) -> float:
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    below = sum((at - middle) ** 2 for at in range(len(values)))
    return sum((at - middle) * (value - mean) for at, value in enumerate(values)) / below if below else 0.0


# Limits of growth per make, after the figures have settled. Seconds and memory are noisy, because the clock and the
# kernel determine them; counts are not. The history is reported but has no limit: see HISTORY.
FLAT: Mapping[str, float] = {
    "memory": 0.05, "engine": 0.25, "files": 0.1, "images": 0.02, "containers": 0.02, "own": 0.01, "data": 0.1,
}  # fmt: skip


HISTORY = (
    "BuildKit's history of builds is not judged: each build adds a record, with its log and trace, and by its source",
    "BuildKit itself removes one once 50 are newer and it is 48 hours old.",
)


def growing(rows: Sequence[Seen], settled: int) -> list[str] | None:
    """Return the figures that grow, with their growth per make; None if too few makes have settled for a slope."""
    if len(rows) < settled + 2:
        return None
    found = slopes(rows, settled)
    return [f"{name} grows by {found[name]:.3f} a make" for name, most in FLAT.items() if found[name] > most]


def run(rows: Iterator[Seen], say: Callable[[Seen], None]) -> list[Seen]:
    found = []
    for row in rows:
        found.append(row)
        say(row)
    return found


def table(what: str, rows: Sequence[Seen], settled: int) -> list[str]:
    """Return a table with the values of each figure at the first make, at the make after which it has settled and at
    the last make, and the slope from the settled make to the last make."""
    found, first, then, last = slopes(rows, settled), asdict(rows[0]), asdict(rows[settled]), asdict(rows[-1])
    most = {name: f"{FLAT[name]:g}" if name in FLAT else "-" for name in found}
    head = [
        f"{len(rows)} makes, {what}, on an engine of its own. `a make`: the slope after the first {settled}, by least",
        "squares; a figure grows where it is more than `at most`, and one without is shown, not judged.",
        *HISTORY,
        "",
        f"| figure | first | after {settled} | last | a make | at most |",
        "|---|---|---|---|---|---|",
    ]
    cells = {name: (*(f"{one[name]:.1f}" for one in (first, then, last)), f"{found[name]:+.4f}") for name in found}
    return [*head, *(f"| {_UNITS[name]} | {' | '.join(row)} | {most[name]} |" for name, row in cells.items())]


_UNITS: Mapping[str, str] = {
    "seconds": "s by the clock", "memory": "MiB at most of envbuild", "engine": "MiB of dockerd and containerd",
    "files": "files these have open", "machine_files": "files open machine-wide, others' too", "images": "images",
    "containers": "containers", "temporary": "temporary folders, others' too",
    "own": "MB of project, state and own cache",
    "data": "MB of the engine's data, without its history of builds",
    "history": "MB of BuildKit's history of builds",
}  # fmt: skip
