"""Reads frames as a strict host would, and starts the self-test in separate processes."""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

from fork_server import ForkedProcess

from . import torch_fork_server

ROOT = Path(__file__).parents[2]
NONCE = "0123456789abcdef" * 2

Frame = dict[str, Any]


def refuse(name: str) -> float:
    raise ValueError(f"not strict JSON: {name}")


def read(data: bytes, nonce: str = NONCE) -> list[Frame]:
    """Return the documents of a whole run; AssertionError if anything is missing, duplicated, cut, foreign or not
    strict JSON."""
    assert data.endswith(b"\n"), "cut"
    frames = []
    for seq, line in enumerate(data.decode("ascii").splitlines()):
        mark, its_nonce, its_seq, crc, body = line.split(" ", 4)
        assert (mark, its_nonce, its_seq) == ("ENVBUILD", nonce, str(seq))
        assert crc == f"{zlib.crc32(body.encode('ascii')):08x}"
        frames.append(json.loads(body, parse_constant=refuse))
    assert frames[0]["kind"] == "start" and frames[-1]["kind"] == "end"
    reported = [frame["probe"] for frame in frames if frame["kind"] == "probe"]
    assert reported == frames[0]["probes"] and len(reported) == frames[-1]["probes"]
    return frames


def outcomes(frames: list[Frame]) -> dict[str, Frame]:
    return {frame["probe"]: frame for frame in frames if frame["kind"] == "probe"}


def job(**fields: Any) -> Frame:
    return {"version": 1, "nonce": NONCE, "level": "quick", "device": "cpu", **fields}


def environment(**extra: str) -> dict[str, str]:
    path = f"{ROOT}:{ROOT / 'tests'}"
    return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path, **extra}


def start(module: str, document: Frame, path: Path, **extra: str) -> ForkedProcess:
    """Start a harness over a module of fake probes, with its frames in the file `path`. Python does not start again:
    see torch_fork_server."""
    arguments = [f"selftest.{module}", json.dumps(document), str(path)]
    return torch_fork_server.start("selftest.driver:main", arguments, environment(**extra))


def run(module: str, document: Frame, path: Path, **extra: str) -> tuple[list[Frame], int, bytes]:
    """Run a harness over a module of fake probes; return the frames, the exit status and the text on stderr. stdout
    must stay empty."""
    with start(module, document, path, **extra) as process:
        out, err = process.communicate(input=b"not for probes", timeout=600)
    assert out == b"", out
    assert process.returncode is not None
    return read(path.read_bytes()), process.returncode, err


def run_new_python(module: str, document: Frame, path: Path, **extra: str) -> bytes:
    """Run the same harness in a new process of Python, and return the text on stderr."""
    command = [sys.executable, "-m", "selftest.driver", f"selftest.{module}", json.dumps(document), str(path)]
    done = subprocess.run(
        command, env=environment(**extra), input=b"not for probes", capture_output=True, timeout=600, check=False
    )
    assert done.stdout == b"", done.stdout
    return done.stderr
