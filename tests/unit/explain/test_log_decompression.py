"""`explain` of several files, folders, compressed logs, and files that are not logs."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
from pathlib import Path

import pytest

from envbuild.explain import log_decompression, log_reader_and_search
from unit.support import envbuild

RANK = "[rank{0}]: ValueError: bad batch\n"
TIMEOUT = (
    "[rank0]:[E1 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)\n"
)


def read(raw: bytes) -> log_reader_and_search.Log:
    return log_reader_and_search.read(io.BytesIO(raw))


def texts(log: log_reader_and_search.Log) -> list[str]:
    return [line.text for line in log.lines]


def test_several_files_are_one_run(tmp_path: Path) -> None:
    (tmp_path / "env.txt").write_text("PyTorch version: 2.3.0+cu121\nGPU 0: NVIDIA H20\n", encoding="utf-8")
    (tmp_path / "train.log").write_text("step 1\nFloating point exception (core dumped)\n", encoding="utf-8")
    names = [str(tmp_path / "env.txt"), str(tmp_path / "train.log")]
    (match,) = json.loads(envbuild("explain", "--json", *names).stdout)["causes"]
    assert match["advisory"] == "cublas-hopper-fpe" and match["confidence"] > 0.8, (
        "the one names the card, the other the crash"
    )
    assert match["lines"] == [{"file": names[1], "line": 2, "text": "Floating point exception (core dumped)"}]
    assert f"{names[1][-30:]}:" in envbuild("explain", *names).stdout
    of_folder, of_files = (
        json.loads(envbuild("explain", "--json", *given).stdout) for given in ([str(tmp_path)], names)
    )
    commands = [document["causes"][0].pop("fix_command") for document in (of_folder, of_files)]
    assert of_folder == of_files
    assert commands == [f"envbuild fix {' '.join(given)} --here" for given in ([str(tmp_path)], names)]


def test_a_folder_is_read_at_any_depth_without_files_that_are_not_logs(tmp_path: Path) -> None:
    folder = tmp_path / "attempt_0" / "2"
    folder.mkdir(parents=True)
    (tmp_path / "attempt_0" / "0.log").write_text(TIMEOUT, encoding="utf-8")
    (folder / "stderr.log").write_text(RANK.format(2), encoding="utf-8")
    (folder / "core.4711").write_bytes(b"\x7fELF" + bytes(4000))
    (tmp_path / ".hidden").write_text("EADDRINUSE\n", encoding="utf-8")
    output = envbuild("explain", str(tmp_path)).stdout
    assert "Cause: rank-died" in output and "first to fail: rank 2" in output
    assert "core.4711 is skipped: it is a program, a library or a core dump" in output
    assert "port-in-use" not in output


def test_an_empty_folder_is_reported(tmp_path: Path) -> None:
    done = envbuild("explain", str(tmp_path))
    assert done.code == 3 and "no file found in" in done.stderr


def test_a_folder_without_a_log_is_reported_with_what_it_has_instead(tmp_path: Path) -> None:
    (tmp_path / "core.4711").write_bytes(b"\x7fELF" + bytes(4000))
    done = envbuild("explain", str(tmp_path))
    assert done.code == 3 and f"no log found in {tmp_path}" in done.stderr
    assert "core.4711 is skipped: it is a program, a library or a core dump" in done.stderr


@pytest.mark.parametrize("parts", [1, 3])
def test_gzip_files_are_unpacked_under_any_name(tmp_path: Path, parts: int) -> None:
    raw = b"".join(gzip.compress(f"line {part}\n".encode()) for part in range(parts))
    found = read(raw + b"")
    assert (texts(found), found.note) == ([f"line {part}" for part in range(parts)], None)
    file = tmp_path / "train.log"
    file.write_bytes(gzip.compress(b"EADDRINUSE\n"))
    assert "port-in-use" in envbuild("explain", str(file)).stdout


def test_a_packed_log_is_read_as_far_as_it_goes() -> None:
    rng = random.Random(1)
    text = "".join(f"step {step} loss {rng.random()}\n" for step in range(20_000))
    raw = gzip.compress(text.encode())
    cut = read(raw[: len(raw) // 2])
    assert len(cut.lines) > 5000 and cut.note and "cut" in cut.note
    damaged = read(raw[: len(raw) // 2] + b"\xff" * 64 + raw[len(raw) // 2 + 64 :])
    assert damaged.note and len(damaged.lines) > 1000
    assert read(raw).note is None


def test_a_bomb_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_decompression, "UNPACKED", 1 << 20)
    found = read(gzip.compress(b"x\n" * (1 << 22)))
    assert found.note and "unpacks to more than" in found.note
    assert len(found.lines) <= (1 << 19) + 1


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\x7fELF" + bytes(100), "core dump"),
        (b"PK\x03\x04" + bytes(100), "zip archive"),
        (b"\xfd7zXZ\0" + bytes(100), "packed with xz"),
        (random.Random(2).randbytes(5000), "binary data"),
        (bytes(5000), "binary data"),
        (gzip.compress(random.Random(3).randbytes(5000)), "binary data"),
    ],
)
def test_a_file_that_is_not_text_gets_a_plain_message(raw: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_bytes(raw)
    done = envbuild("explain", str(file))
    assert done.code == 3 and f"{file} is not a log: it is " in done.stderr and words in done.stderr


@pytest.mark.parametrize(
    "raw",
    [
        "a\nb\n".encode("utf-16"),
        "a\nb\n".encode("utf-16-le"),
        "训练开始\n浮点数例外\n".encode("gbk"),
        b" 1%|\b\b\b\b 2%|\r 3%\x1b[A\x1b[2K\a\n" * 50,
        b"step 1\n" + bytes(20) + b"step 2\n",
    ],
    ids=["PowerShell", "without a mark", "GBK", "a progress bar", "a hole of NULs"],
)
def test_odd_text_is_still_text(raw: bytes) -> None:
    assert read(raw).foreign is None


@pytest.mark.parametrize("raw", ["", "\n \n"])
def test_an_empty_log_is_refused(tmp_path: Path, raw: str) -> None:
    file = tmp_path / "train.log"
    file.write_text(raw, encoding="utf-8")
    done = envbuild("explain", str(file))
    assert (done.code, done.stdout) == (3, "")
    assert f"{file} is empty" in done.stderr and "tee train.log" in done.stderr
    assert envbuild("explain", str(file), "--json").document["error"]["kind"] == "file"


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    done = envbuild("explain", os.fspath(tmp_path / "none.log"))
    assert done.code == 3 and "none.log cannot be read: No such file or directory" in done.stderr
