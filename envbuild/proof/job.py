"""What a test run is: the self-test and its job document go in, numbered frames come out. Pure.

The output is not trusted: it counts only if every frame of this run is there, whole, once, and in order.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import secrets
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from envbuild.plan import facts
from envbuild.plan.profile import SelfTest

_SOURCES = Path(__file__).parent.parent / "selftest"

# Its arguments: the module whose main takes the job, and the file to read where that is not stdin (a bind mount would
# name a path of the engine's host). It reads a line with two lengths, the zip, the job document.
BOOTSTRAP = """
import importlib, json, os, sys, tempfile
if sys.version_info < (3, 9):
    sys.exit("Python 3.9 or newer is needed, this is " + sys.version.split()[0])
stream = open(sys.argv[2], "rb") if len(sys.argv) > 2 else sys.stdin.buffer
sizes = [int(part) for part in stream.readline(64).split()]
read = stream.read
folder = tempfile.mkdtemp()
path = os.path.join(folder, "selftest.zip")
with open(path, "wb") as file:
    file.write(read(sizes[0]))
job = json.loads(read(sizes[1]))
if sys.path[0] == "":
    del sys.path[0]
sys.path.insert(0, path)
sys.exit(importlib.import_module(sys.argv[1]).main(job))
"""


@dataclass(frozen=True)
class Limits:
    """Of the container: memory and shared memory in bytes, time in seconds."""

    memory: int
    timeout: float
    shm: int = 1 << 30
    pids: int = 4096
    tmp: int = 2 << 30


@dataclass(frozen=True)
class Job:
    """One run, ready for any runner: what to start, what to write to its stdin, and its limits."""

    image: str
    argv: tuple[str, ...]
    stdin: bytes
    nonce: str
    limits: Limits
    gpus: bool = False


@dataclass(frozen=True)
class RawOutput:
    """What a runner brings back. `exit_code` None: never ended by itself."""

    stdout: bytes
    stderr: str
    exit_code: int | None
    seconds: float
    out_of_memory: bool = False
    timed_out: bool = False
    too_long: bool = False


@dataclass(frozen=True)
class TestRun:
    """A judged run. `errors` are faults of the run itself: with any of them nothing in it counts as passed.

    `skipped_required`: probes that the profile requires and that could not run here; no failure, and no proof.
    """

    results: tuple[Mapping[str, Any], ...]
    environment: Mapping[str, Any]
    start: Mapping[str, Any]
    errors: tuple[str, ...]
    seconds: float
    skipped_required: tuple[str, ...] = ()
    log: str = field(default="", compare=False)

    def by_status(self, status: str) -> list[str]:
        return [result["probe"] for result in self.results if result["status"] == status]

    @property
    def passed(self) -> bool:
        """No failure, and something ran."""
        return not self.errors and bool(self.by_status("passed")) and not self.by_status("failed")

    def failures(self) -> list[dict[str, Any]]:
        """{"probe", "signal", "advisory", "detail"} for each failed probe, and for each fault of the run."""
        found = [_failure(result) for result in self.results if result["status"] == "failed"]
        found += [{"probe": None, "signal": None, "advisory": None, "detail": text} for text in self.errors]
        return found

    def summary(self) -> dict[str, Any]:
        counts = {status: len(self.by_status(status)) for status in ("passed", "failed", "skipped")}
        if self.errors:
            counts["passed"] = 0
        return {**counts, "seconds": round(self.seconds, 2), "failures": self.failures()}


def _failure(result: Mapping[str, Any]) -> dict[str, Any]:
    advisory = next((advisory for advisory in facts.advisories() if advisory.matches(result)), None)
    where = f" at {result['at']}" if result["at"] else ""
    return {
        "probe": result["probe"],
        "signal": result["signal"],
        "advisory": advisory.id if advisory else None,
        "detail": f"{result['failure']}{where}: {result['reason']}",
    }


@cache
def selftest_zip() -> bytes:
    """The self-test's own sources, deterministic: fixed times, sorted names."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("envbuild/__init__.py"), b"")
        for file in sorted(_SOURCES.rglob("*.py")):
            name = zipfile.ZipInfo(f"envbuild/selftest/{file.relative_to(_SOURCES).as_posix()}")
            archive.writestr(name, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


@cache
def selftest_id() -> str:
    """sha256 over the names and contents of the sources; a compressor's version does not change it."""
    digest = hashlib.sha256()
    for file in sorted(_SOURCES.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(_SOURCES).as_posix()}\0{len(content)}\0".encode() + content)
    return f"sha256:{digest.hexdigest()}"


def payload(document: bytes) -> bytes:
    """What BOOTSTRAP reads: the self-test and a job document for it."""
    archive = selftest_zip()
    return f"{len(archive)} {len(document)}\n".encode() + archive + document


def make(image: str, wanted: SelfTest, versions: Mapping[str, str], python: str, gpus: Sequence[str] = ()) -> Job:
    """The job that tests `image` (the engine's handle) against locked `versions` (distribution -> version).

    `gpus`: the names that the card may have, as the driver prints them; none: the CPU.
    """
    nonce = secrets.token_hex(16)
    memory = int(wanted.memory_gb * (1 << 30))
    document = json.dumps(
        {
            "version": 1,
            "nonce": nonce,
            "level": wanted.level,
            "device": "cuda" if gpus else "cpu",
            "probes": None,
            "require": required(wanted, bool(gpus)),
            "expect": {"distributions": dict(versions), "python": python, "gpus": list(gpus)},
            "settings": {"allow_tf32": wanted.allow_tf32},
            "timeouts": {},
            "threads": None,
            "memory_mb": None,
        }
    ).encode()
    return Job(
        image=image,
        # -I keeps the working folder and PYTHON* variables out
        argv=("python", "-I", "-c", BOOTSTRAP, "envbuild.selftest.__main__"),
        stdin=payload(document),
        nonce=nonce,
        limits=Limits(memory=memory, timeout=float(wanted.timeout)),
        gpus=bool(gpus),
    )


def required(wanted: SelfTest, gpu: bool) -> list[str]:
    """What must pass: the profile's list, and on a GPU which card it is."""
    return list(dict.fromkeys([*(["env.identity"] if gpu else []), *wanted.require]))


class _Frame(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, defer_build=True)


def _printable(text: str) -> str:
    """What an image says goes to a terminal: no escape sequences."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


Said = Annotated[str, AfterValidator(_printable)]


class _Probe(_Frame):
    probe: str = Field(pattern=r"^[a-z0-9._]{1,60}$")
    level: Said = Field(max_length=20)
    status: str = Field(pattern="^(passed|failed|skipped)$")
    reason: Said | None = Field(max_length=4000)
    failure: Said | None = Field(max_length=60)
    signal: Said | None = Field(max_length=20)
    at: Said | None = Field(max_length=1000)
    detail: Said | None = Field(max_length=20000)
    figures: list[dict[str, Any]] = Field(max_length=5000)
    seconds: float
    traits: dict[str, Any] = {}


class _Start(_Frame):
    probes: list[Annotated[str, Field(pattern=r"^[a-z0-9._]{1,60}$")]] = Field(max_length=500)


class _End(_Frame):
    probes: int
    passed: int
    failed: int
    skipped: int


def frame(line: bytes, nonce: str) -> tuple[int, dict[str, Any]] | None:
    """(sequence number, document) of a line that is a whole frame of this run; None for any other line."""
    parts = line.rstrip(b"\n").split(b" ", 4)
    if len(parts) != 5 or parts[0] != b"ENVBUILD" or parts[1] != nonce.encode():
        return None
    try:
        if int(parts[3], 16) != zlib.crc32(parts[4]):
            return None
        document = json.loads(parts[4], parse_constant=_refuse, parse_float=_finite, parse_int=_bounded)
        return (int(parts[2]), document) if isinstance(document, dict) else None
    except (ValueError, RecursionError):
        return None


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _bounded(text: str) -> int:
    return int(text) if len(text) < 20 else int(_refuse(text))


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def told(line: bytes, nonce: str) -> str | None:
    """What a line says of a probe that ended, for whoever waits; None for any other line."""
    found = frame(line, nonce)
    if found is None or found[1].get("kind") != "probe":
        return None
    try:
        probe = _Probe.model_validate(found[1])
    except ValidationError:
        return None
    return f"{probe.probe}: {probe.status}"


def judge(output: RawOutput, nonce: str, require: Sequence[str]) -> TestRun:
    """What the output says, every doubt counted as an error."""
    errors = [*_ending(output)]
    documents: list[dict[str, Any]] = []
    for line in output.stdout.split(b"\n"):
        found = frame(line, nonce)
        if found is None:
            if line.startswith(b"ENVBUILD"):
                errors.append("a frame of the self-test's output is damaged, or not of this run")
            continue
        if found[0] != len(documents):
            errors.append(f"frame {len(documents)} of the self-test's output is missing, frame {found[0]} came")
            break
        documents.append(found[1])
    planned, results, shape = _results(documents)
    errors += shape
    if output.timed_out:
        results += _hung(planned, results, output.seconds)
    if (output.exit_code == 5) != any(result["status"] == "failed" for result in results) and not errors:
        errors.append(f"the self-test ended with exit code {output.exit_code}, which does not fit its results")
    ran = {result["probe"]: result["status"] for result in results}
    if documents or not errors:  # where nothing came at all, why it ended says enough
        errors += [f"required probe {name} is not among the results" for name in require if name not in ran]
    of_kind = {str(document.get("kind")): document for document in documents}
    return TestRun(
        results=tuple(results),
        environment=of_kind.get("environment", {}),
        start=of_kind.get("start", {}),
        errors=tuple(dict.fromkeys(errors)),
        seconds=output.seconds,
        skipped_required=tuple(name for name in require if ran.get(name) == "skipped"),
        log=output.stderr,
    )


def _hung(planned: Sequence[str], results: Sequence[object], seconds: float) -> list[dict[str, Any]]:
    """The probe that was running when the time for all of them was over, as a result of its own."""
    running = planned[len(results) :][:1]
    reason = f"it did not end; the whole self-test was stopped after {seconds:.0f} s"
    given = {"level": "", "status": "failed", "failure": "hang", "reason": reason, "signal": None, "at": None}
    return [{"probe": name, **given, "detail": None, "figures": [], "seconds": 0.0, "traits": {}} for name in running]


def _ending(output: RawOutput) -> list[str]:
    if output.timed_out:
        return [f"the self-test was stopped after {output.seconds:.0f} s"]
    if output.too_long:
        return ["the self-test's output was too long and was cut off"]
    if output.out_of_memory and output.exit_code != 0 and output.exit_code != 5:
        return ["the container ran out of memory"]
    if output.exit_code not in (0, 5):
        last = output.stderr.strip().splitlines()[-1:] or [""]
        return [f"the self-test ended with exit code {output.exit_code}: {last[0][:300]}"]
    return []


def _results(documents: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[dict[str, Any]], list[str]]:
    """The planned probes, their results, and what is wrong with the sequence start, probe..., environment, end."""
    kinds = [document.get("kind") for document in documents]
    if not kinds or kinds[0] != "start":
        return [], [], ["the self-test's output holds no frame of this run"]
    if kinds.count("start") != 1 or kinds.count("end") != 1 or kinds[-1] != "end":
        errors = ["the self-test's output is cut short, or goes on after its end"]
    else:
        errors = []
    try:
        start = _Start.model_validate(documents[0])
        results = [_Probe.model_validate(d).model_dump() for d in documents if d.get("kind") == "probe"]
        end = _End.model_validate(documents[-1]) if not errors else None
    except ValidationError as error:
        return (
            [],
            [],
            [*errors, f"a frame of the self-test's output is not as it should be: {error.errors()[0]['msg']}"],
        )
    names = [result["probe"] for result in results]
    if names != start.probes and end is not None:
        errors.append("the probes that ran are not those that were planned")
    counted = [sum(result["status"] == status for result in results) for status in ("passed", "failed", "skipped")]
    if end is not None and [end.probes, end.passed, end.failed, end.skipped] != [len(results), *counted]:
        errors.append("the self-test's last frame does not fit the probes' results")
    return start.probes, results, errors
