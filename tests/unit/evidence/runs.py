"""Outputs of a self-test, as the harness writes them, and changes that make these outputs invalid."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

from envbuild.testrun.output_judge import judge_output
from envbuild.testrun.run_result import ProbeResult, RawOutput, RunLocation, TestRun

NONCE = "0123456789abcdef0123456789abcdef"
NAMES = ("env.libs", "gemm.crash", "train.step")


def probe(name: str, status: str = "passed", **changes: Any) -> dict[str, Any]:
    failed = status == "failed"
    return {
        "kind": "probe", "probe": name, "level": "quick", "status": status, "seconds": 0.25, "traits": {},
        "detail": None, "reason": "why" if status != "passed" else None, "failure": "signal" if failed else None,
        "signal": "SIGFPE" if failed else None, "at": "a step" if failed else None,
        "figures": [{"name": "error", "ratio": 0.5}], **changes,
    }  # fmt: skip


def ended_probe(name: str, status: str = "passed", **changes: Any) -> ProbeResult:
    """Return the result of a probe, as judged."""
    return passed_run(probe(name, status, **changes)).results[0]


def documents(*probes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the documents of a whole run: start, each probe, the environment after the first probe, end."""
    found = list(probes) or [probe(name) for name in NAMES]
    counts = {status: sum(p["status"] == status for p in found) for status in ("passed", "failed", "skipped")}
    start = {"kind": "start", "torch": "2.13.0", "probes": [p["probe"] for p in found], "level": "quick"}
    environment = {"kind": "environment", "libraries": []}
    return [start, found[0], environment, *found[1:], {"kind": "end", "probes": len(found), **counts}]


def line(body: bytes, number: int, nonce: str = NONCE, crc: int | None = None) -> bytes:
    return f"ENVBUILD {nonce} {number} {zlib.crc32(body) if crc is None else crc:08x} ".encode() + body + b"\n"


def lines(found: Sequence[dict[str, Any]]) -> list[bytes]:
    return [line(json.dumps(document).encode(), number) for number, document in enumerate(found)]


def output(stdout: bytes | Sequence[bytes], **changes: Any) -> RawOutput:
    joined = stdout if isinstance(stdout, bytes) else b"".join(stdout)
    return RawOutput(**{"stdout": joined, "stderr": "", "exit_code": 0, "seconds": 1.5, **changes})


def judged(stdout: bytes | Sequence[bytes], require: Sequence[str] = (), **changes: Any) -> TestRun:
    return judge_output(output(stdout, **changes), NONCE, require)


def passed_run(*probes: dict[str, Any]) -> TestRun:
    return judged(lines(documents(*probes)), exit_code=5 if any(p["status"] == "failed" for p in probes) else 0)


def run_on(card: str, driver: str = "550.54.15", cublas: str = "12.5.2.13") -> TestRun:
    """Return a passed run on a GPU, with torch 2.3.1 and one loaded library."""
    cards = [{"name": card, "uuid_sha256": "a" * 64}]
    found = documents(probe("env.identity", traits={"gpus": cards, "driver": driver}), probe("env.libs"))
    library = {"owner": f"nvidia-cublas-cu12=={cublas}", "record": True, "name": "libcublas.so.12"}
    installed = {"torch": "2.3.1", "nvidia-cublas-cu12": cublas}
    environment = {"kind": "environment", "libraries": [library], "distributions": installed}
    return judged(lines([environment if one["kind"] == "environment" else one for one in found]))


def located(run: RawOutput | TestRun) -> RunLocation:
    """Return the place where a cluster ran the self-test."""
    assert run.where is not None
    return run.where
