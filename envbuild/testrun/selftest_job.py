"""Builds a job: the input of a self-test run (the self-test's code and its job document) and the limits of the run.
Pure, except that it reads the self-test's source files and draws random nonces and seeds."""

from __future__ import annotations

import hashlib
import io
import json
import secrets
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from envbuild.facts import probe_catalogue_reader
from envbuild.profile.model import SelfTest
from envbuild.util.strict_and_canonical_json import canonical_digest

FINGERPRINT = "fingerprint"  # the probe that records a fingerprint
OWN_SCRIPT = "own.script"  # the probe that runs a profile's own script
ACROSS = "dist.nodes"  # the probe that runs on several nodes
_SOURCES = Path(__file__).parent.parent / "selftest"

# The program that starts the self-test. Its arguments: the module whose `main` receives the job, and optionally a file
# with the input. The default is stdin, because a bind mount would need a path on the engine's host. The input consists
# of a line with two lengths, the zip file, and the job document. Importer exists because `zipimporter.get_filename`
# compiles the module, which the import compiles again.
BOOTSTRAP = """
import importlib, json, os, sys, tempfile, zipimport
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
class Importer(zipimport.zipimporter):
    def __init__(self, entry):
        if not entry.startswith(path):
            raise ImportError
        super().__init__(entry)
    def get_filename(self, name):
        end = "/__init__.py" if self.is_package(name) else ".py"
        return os.path.join(self.archive, self.prefix + name.rpartition(".")[2] + end)
sys.path_hooks.insert(0, Importer)
if sys.path[0] == "":
    del sys.path[0]
sys.path.insert(0, path)
from envbuild.selftest.inventory import startup_code_suppression
startup_code_suppression.extend_path(variables=not sys.flags.isolated)
sys.exit(importlib.import_module(sys.argv[1]).main(job))
"""


@dataclass(frozen=True)
class Limits:
    """Limits of the container: `memory`, shared memory (`shm`) and /tmp (`tmp`) in bytes, `timeout` in seconds, and the
    number of processes (`pids`)."""

    memory: int
    timeout: float
    shm: int = 1 << 30
    pids: int = 4096
    tmp: int = 2 << 30


@dataclass(frozen=True)
class RunRequest:
    """The part of a profile's self-test to run. The default is everything.

    `level`: replaces the profile's level. `probes`: run exactly these probes. `gpus`: the machine's GPUs to use, by
    index or UUID. `fingerprint`: also run the fingerprint probe, which no level includes. `seed`: determines the
    sampled cases; None: the default seed.
    """

    level: str | None = None
    probes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    fingerprint: bool = False
    seed: int | None = None


ALL = RunRequest()
_MOST_SEED = 2**31 - 1


@dataclass(frozen=True)
class Job:
    """One run of the self-test, for any runner: the command, its stdin, and its limits.

    `image`: the image's digest reference in the engine that runs it. `devices`: the machine's GPUs to use, by index or
    UUID; empty: all GPUs, or, with a scheduler, `count` GPUs of one of `models` (GPU ids). `require`: the probes that
    must pass. `nodes`: the number of nodes that run the job together over a network, each with `count` GPUs.
    `is_selftest`: False for the collector of an audit.
    """

    image: str
    argv: tuple[str, ...]
    stdin: bytes
    nonce: str
    limits: Limits
    gpus: bool = False
    devices: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    count: int = 1
    require: tuple[str, ...] = ()
    nodes: int = 1
    is_selftest: bool = True

    @property
    def resumable(self) -> bool:
        """Whether a later process can wait for the job on a cluster. The results of other jobs are combined with what
        only this process knows."""
        return self.is_selftest and self.nodes == 1


_AROUND_BURN = 240  # seconds to create the matrices and to check the last results, added to the time of the burn-in
# The zip's __main__.py, which makes the zip executable: `python selftest.zip --level quick`.
_PROGRAM = b"import sys\nfrom envbuild.selftest.__main__ import command\nsys.exit(command())\n"


@cache
def selftest_zip() -> bytes:
    """Return a zip of the self-test's sources, which Python 3.9 or newer with torch can run. The bytes are
    deterministic: the times are fixed and the names are sorted."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py"), _PROGRAM)
        archive.writestr(zipfile.ZipInfo("envbuild/__init__.py"), b"")
        for file in sorted(_SOURCES.rglob("*.py")):
            name = zipfile.ZipInfo(f"envbuild/selftest/{file.relative_to(_SOURCES).as_posix()}")
            archive.writestr(name, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


@cache
def selftest_id() -> str:
    """Return the sha256 of the names and contents of the self-test's sources. Unlike the zip, it does not depend on the
    version of the compressor."""
    digest = hashlib.sha256()
    for file in sorted(_SOURCES.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(_SOURCES).as_posix()}\0{len(content)}\0".encode() + content)
    return f"sha256:{digest.hexdigest()}"


def drawn_seed() -> int:
    """Return a random seed."""
    return 1 + secrets.randbelow(_MOST_SEED)


def bootstrap_payload(document: bytes) -> bytes:
    """Return the input of BOOTSTRAP: the self-test and a job document."""
    archive = selftest_zip()
    return f"{len(archive)} {len(document)}\n".encode() + archive + document


@dataclass(frozen=True)
class Expectations:
    """What the self-test expects of the environment and the machine.

    `versions`: the locked version of each distribution. `python`: Python's version, such as "3.11". `gpus`: the allowed
    GPU names as the driver prints them; empty: test the CPU. `gpu_count`: the number of GPUs that must be present and
    work together. `hardware`: more expectations, as returned by expected_hardware.expected_hardware.
    """

    versions: Mapping[str, str]
    python: str
    gpus: Sequence[str] = ()
    gpu_count: int = 1
    hardware: Mapping[str, object] = field(default_factory=dict)


def make_job(
    image: str,
    wanted: SelfTest,
    expected: Expectations,
    request: RunRequest = ALL,
    models: Sequence[str] = (),
    nonce: str | None = None,
) -> Job:
    """Return the job that tests `image`, the image's digest reference in the engine.

    If `image` is empty, the job tests an environment of this machine, and Python's environment variables have an
    effect. `models`: the ids of the expected GPU models, such as h200. `nonce`: the nonce of the run to resume; None:
    generate a new one.
    """
    nonce = nonce or secrets.token_hex(16)
    on_gpu = bool(expected.gpus)
    return Job(
        image=image,
        argv=("python", *started(image), "-c", BOOTSTRAP, "envbuild.selftest.__main__"),
        stdin=bootstrap_payload(json.dumps(document(wanted, expected, request, nonce)).encode()),
        nonce=nonce,
        limits=_limits(wanted, on_gpu),
        gpus=on_gpu,
        devices=request.gpus,
        models=tuple(models),
        count=expected.gpu_count,
        require=tuple(required_probes(wanted, on_gpu, request, expected.gpu_count)),
    )


def started(image: str) -> tuple[str, ...]:
    """Return Python's options. -S: no package may run code before the self-test. In an image also -I: Python ignores
    the working directory and PYTHON* variables."""
    return ("-I", "-S") if image else ("-S",)


def _limits(wanted: SelfTest, gpu: bool) -> Limits:
    memory = int(wanted.memory_gb * (1 << 30))
    # shared memory for NCCL's segments, which GPUs without P2P use: 10 MB each (NVIDIA/nccl#290), or 193 MB
    # (vllm-project/vllm#18831)
    return Limits(memory, float(wanted.timeout), shm=memory // 2 if gpu else Limits.shm)


def document(
    wanted: SelfTest, expected: Expectations, request: RunRequest = ALL, nonce: str = "0" * 32
) -> dict[str, object]:
    """Return the job document. `nonce`: marks the frames in the output of this run; the default is for output that is
    not judged."""
    required = required_probes(wanted, bool(expected.gpus), request, expected.gpu_count)
    return {
        "version": 1,
        "nonce": nonce,
        "level": request.level or wanted.level,
        "device": "cuda" if expected.gpus else "cpu",
        "probes": required if request.probes else None,
        "require": required,
        "expect": {
            "distributions": dict(expected.versions),
            "python": expected.python,
            "gpus": list(expected.gpus),
            "gpu_count": expected.gpu_count,
            "transport": wanted.transport,
            **expected.hardware,
        },
        "settings": {"allow_tf32": wanted.allow_tf32},
        "own": {
            "shapes": [shape.model_dump() for shape in wanted.shapes],
            "script": {"name": wanted.script.name, "text": wanted.script.text} if wanted.script else None,
        },
        "timeouts": {"burn": wanted.burn_seconds + _AROUND_BURN},
        "floors": wanted.floor.model_dump(exclude_none=True),
        "burn_seconds": wanted.burn_seconds,
        "seed": request.seed,
        "threads": None,
        "memory_mb": None,
    }


def performance_requirements(wanted: SelfTest) -> dict[str, float]:
    """Return the numeric requirements of the profile: minimum fractions of the datasheet's speed, and the seconds of
    the burn-in. Evidence is valid only if its run had at least these requirements."""
    burn = {"burn": float(wanted.burn_seconds)} if wanted.level == "full" else {}
    return {**wanted.floor.model_dump(exclude_none=True), **burn}


def required_probes(wanted: SelfTest, gpu: bool, request: RunRequest = ALL, gpu_count: int = 1) -> list[str]:
    """Return the probes that must pass. If probes are requested by name, these. Otherwise the profile's list,
    env.identity on a GPU, dist.staged for several GPUs or a required transport, and the profile's own script; without
    those that the requested level does not include. A requested fingerprint is always added."""
    extra = [FINGERPRINT] if request.fingerprint else []
    if request.probes:
        return list(dict.fromkeys([*request.probes, *extra]))
    identity = ["env.identity"] if gpu else []
    staged = ["dist.staged"] if gpu and (gpu_count > 1 or wanted.transport) else []
    script = [OWN_SCRIPT] if wanted.script else []
    names = [*identity, *wanted.require, *staged, *script]
    reached = (
        name
        for name in names
        if request.level is None or probe_catalogue_reader.known_probes()[name].within(request.level)
    )
    return list(dict.fromkeys([*reached, *extra]))


def on_host(wanted: SelfTest, request: RunRequest = ALL) -> SelfTest:
    """Return the self-test without the profile's own script. Outside a container the script runs only if it is
    requested by name."""
    return wanted if OWN_SCRIPT in request.probes else wanted.model_copy(update={"script": None})


def left_out_on_host(wanted: SelfTest, request: RunRequest = ALL) -> dict[str, str]:
    """Return the probe own.script with the reason why it does not run, if only `on_host` removed it; otherwise an empty
    mapping."""
    gone = wanted.script and not on_host(wanted, request).script and not request.probes
    return {OWN_SCRIPT: f"runs outside a container only with --probe {OWN_SCRIPT}"} if gone else {}


def project_tests_digests(wanted: SelfTest) -> dict[str, str]:
    """Return the sha256 of each part that the profile adds to the self-test. Evidence is valid only for exactly these
    parts."""
    shapes = {"shapes": canonical_digest([shape.model_dump() for shape in wanted.shapes])} if wanted.shapes else {}
    return shapes | ({"script": wanted.script.sha256} if wanted.script else {})
