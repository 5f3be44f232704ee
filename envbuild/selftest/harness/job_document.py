"""The job document: the parameters of one run of the self-test.

The document comes from outside the container. Therefore every field is validated, and all faults are reported together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envbuild.selftest.distributed.nccl_log import TRANSPORTS
from envbuild.selftest.harness import project_test_spec_reader
from envbuild.selftest.harness.cpu_count import processors
from envbuild.selftest.harness.project_test_spec_reader import ProjectTestSpec

VERSION = 1
LEVELS = ("quick", "standard", "full")
DEVICES = ("cpu", "cuda")
SETTINGS = (
    "allow_tf32",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",  # from torch 2.7 on
)
_TOP_KEYS = ("version", "nonce", "level", "device", "probes", "require", "expect", "settings", "timeouts")
_KEYS = frozenset((*_TOP_KEYS, "threads", "memory_mb", "own", "floors", "burn_seconds", "seed"))
_TOGETHER = ("gpus", "gpu_count", "nodes", "transport")
_EXPECT_KEYS = frozenset(("distributions", "python", "driver", "datasheets", "cards", *_TOGETHER))
_CARD_KEYS = frozenset(("compute_capability", "sms"))
_DRIVER_KEYS = ("cuda", "profile")
DATASHEET = ("fp32", "tf32", "fp16", "bf16", "copy")
FLOORS = ("gemm", "memory")
_DRIVER = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}")
_CAPABILITY = re.compile(r"[0-9]{1,2}\.[0-9]")
_NONCE = re.compile(r"[0-9a-f]{32}")


class JobError(Exception):
    """Raised if the job document is invalid; `faults` has one sentence for each fault."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


@dataclass(frozen=True)
class JobDocument:
    """The parameters of one run: the probes, the device, and the expected versions and hardware.

    `probes`: the names of the probes to run; None runs the probes of the level and those in `require`. `require`:
    probes that also run at a lower level than their own, and that must not be skipped.
    `timeouts`: time limits of probes in seconds, which replace the default limits. `memory_mb`: how many MiB of address
    space a probe may use in addition to those mapped when its process starts.
    `gpu_count`: the number of GPUs that must work together on each of the `nodes` machines. `transport`: dist.staged
    fails if NCCL chooses another transport between GPUs; None allows every transport.
    `driver`: the oldest driver that supports torch's CUDA version ("cuda"), and the oldest driver that the profile
    allows ("profile").
    `cards`: for each GPU model, its "compute_capability" (such as "9.0") and optionally its number of multiprocessors
    ("sms").
    `datasheets`: for each GPU model, the dense TFLOP/s of each precision and the GB/s of a copy. `floors`: the
    fractions of these values that matrix products ("gemm") and copies ("memory") must reach. `burn_seconds`: how long
    the probe burn runs at level full.
    `seed`: the seed of the sampled test cases (pairwise_case_sampling.py).
    `own`: the tests that the profile adds.
    """

    nonce: str
    level: str = "quick"
    device: str = "cpu"
    probes: tuple[str, ...] | None = None
    require: tuple[str, ...] = ()
    distributions: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None
    gpus: tuple[str, ...] = ()
    gpu_count: int = 1
    nodes: int = 1
    transport: str | None = None
    driver: Mapping[str, str] = field(default_factory=dict)
    cards: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    datasheets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    floors: Mapping[str, float] = field(default_factory=dict)
    burn_seconds: int = 60
    seed: int = 1
    settings: Mapping[str, bool] = field(default_factory=dict)
    timeouts: Mapping[str, float] = field(default_factory=dict)
    threads: int | None = None
    memory_mb: int | None = None
    own: ProjectTestSpec = field(default_factory=ProjectTestSpec)

    @property
    def thread_count(self) -> int:
        """The number of threads for a probe: the requested number, or else one for each available processor."""
        return self.threads or processors()

    @property
    def allow_tf32(self) -> bool:
        """Whether matrix products and convolutions in float32 may use TF32; probe_process sets torch's flags so."""
        return self.settings.get("allow_tf32", False)


class _Reader:
    """Reads and validates fields of a JSON object, and collects the faults that it finds."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def fault(self, where: str, message: str) -> None:
        self.faults.append(f"{where}: {message}")

    def keys(self, where: str, document: Mapping[str, Any], known: frozenset[str]) -> None:
        for key in sorted(set(map(str, document)) - known):
            self.fault(where + key, "unknown key")

    def choice(self, where: str, value: Any, allowed: tuple[str, ...]) -> str:
        if value not in allowed:
            self.fault(where, "expected one of {}, got {!r}".format(", ".join(allowed), value))
        return str(value)

    def mapping(self, where: str, value: Any) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.fault(where, f"expected a mapping, got {value!r}")
            return {}
        return {str(key): item for key, item in value.items()}

    def names(self, where: str, value: Any, known: frozenset[str] | None = None) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.fault(where, f"expected a list of names, got {value!r}")
            return ()
        for name in value:
            if known is not None and name not in known:
                self.fault(where, f"unknown probe {name!r}")
        return tuple(value)

    def texts(self, where: str, value: Any) -> dict[str, str]:
        found = self.mapping(where, value)
        for key, item in found.items():
            if not isinstance(item, str):
                self.fault(f"{where}.{key}", f"expected a string, got {item!r}")
        return {key: str(item) for key, item in found.items()}

    def releases(self, where: str, value: Any, known: tuple[str, ...]) -> dict[str, str]:
        found = self.texts(where, value)
        self.keys(where + ".", found, frozenset(known))
        for key, item in found.items():
            if not _DRIVER.fullmatch(item):
                self.fault(f"{where}.{key}", f"expected numbers and dots, got {item!r}")
        return found

    def flags(self, where: str, value: Any, known: tuple[str, ...]) -> dict[str, bool]:
        found = self.mapping(where, value)
        self.keys(where + ".", found, frozenset(known))
        for key, item in found.items():
            if not isinstance(item, bool):
                self.fault(f"{where}.{key}", f"expected true or false, got {item!r}")
        return {key: bool(item) for key, item in found.items()}

    def numbers(self, where: str, value: Any, known: Iterable[str], what: str = "a number") -> dict[str, float]:
        good: dict[str, float] = {}
        for key, item in self.mapping(where, value).items():
            number = isinstance(item, (int, float)) and not isinstance(item, bool)
            if key not in known:
                self.fault(f"{where}.{key}", "unknown key")
            elif not number or not math.isfinite(item) or item <= 0:
                self.fault(f"{where}.{key}", f"expected {what} above zero, got {item!r}")
            else:
                good[key] = float(item)
        return good

    def card(self, where: str, value: Any) -> dict[str, Any]:
        found = self.mapping(where, value)
        self.keys(where + ".", found, _CARD_KEYS)
        capability = found.get("compute_capability")
        if not isinstance(capability, str) or not _CAPABILITY.fullmatch(capability):
            self.fault(f"{where}.compute_capability", f'expected a value such as "9.0", got {capability!r}')
        self.count(f"{where}.sms", found.get("sms"))
        return found

    def count(self, where: str, value: Any) -> int | None:
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.fault(where, f"expected a whole number above zero, got {value!r}")
            return None
        return value


def parse(document: Any, known: frozenset[str]) -> JobDocument:
    """Parse a job document. `known`: the names of all probes. Raises JobError, which lists all faults."""
    if not isinstance(document, dict):
        raise JobError(["the job document is not a mapping"])
    reader = _Reader()
    reader.keys("", document, _KEYS)
    if document.get("version") != VERSION:
        reader.fault("version", "expected {}, got {!r}".format(VERSION, document.get("version")))
    nonce = document.get("nonce")
    if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce):
        reader.fault("nonce", "expected 32 lower-case hexadecimal digits")
    expect = reader.mapping("expect", document.get("expect"))
    reader.keys("expect.", expect, _EXPECT_KEYS)
    python = expect.get("python")
    if python is not None and not isinstance(python, str):
        reader.fault("expect.python", f"expected a string, got {python!r}")
    transport = expect.get("transport")
    probes = document.get("probes")
    job = JobDocument(
        nonce=str(nonce),
        level=reader.choice("level", document.get("level", "quick"), LEVELS),
        device=reader.choice("device", document.get("device", "cpu"), DEVICES),
        probes=None if probes is None else reader.names("probes", probes, known),
        require=reader.names("require", document.get("require", []), known),
        distributions=reader.texts("expect.distributions", expect.get("distributions")),
        python=python,
        gpus=reader.names("expect.gpus", expect.get("gpus", [])),
        gpu_count=reader.count("expect.gpu_count", expect.get("gpu_count")) or 1,
        nodes=reader.count("expect.nodes", expect.get("nodes")) or 1,
        transport=None if transport is None else reader.choice("expect.transport", transport, TRANSPORTS),
        cards={
            name: reader.card(f"expect.cards.{name}", card)
            for name, card in reader.mapping("expect.cards", expect.get("cards")).items()
        },
        datasheets={
            name: reader.numbers(f"expect.datasheets.{name}", sheet, DATASHEET)
            for name, sheet in reader.mapping("expect.datasheets", expect.get("datasheets")).items()
        },
        floors=reader.numbers("floors", document.get("floors"), FLOORS),
        driver=reader.releases("expect.driver", expect.get("driver"), _DRIVER_KEYS),
        settings=reader.flags("settings", document.get("settings"), SETTINGS),
        timeouts=reader.numbers("timeouts", document.get("timeouts"), known, "seconds"),
        burn_seconds=reader.count("burn_seconds", document.get("burn_seconds")) or JobDocument.burn_seconds,
        seed=reader.count("seed", document.get("seed")) or JobDocument.seed,
        threads=reader.count("threads", document.get("threads")),
        memory_mb=reader.count("memory_mb", document.get("memory_mb")),
        own=project_test_spec_reader.read(document.get("own"), reader.fault),
    )
    if reader.faults:
        raise JobError(reader.faults)
    return job
