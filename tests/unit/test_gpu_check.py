"""benchmarks/gpu_check.py without a GPU: leftovers of an interrupted run, limits, verdicts and exit codes."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

CHECKOUT = Path(__file__).parents[2]
sys.path[:0] = [str(CHECKOUT / "benchmarks"), str(CHECKOUT / "tests")]

import gpu_check  # noqa: E402
import machine  # noqa: E402
from gpu_plan import locked_files, selftests, steplog, steps, summary  # noqa: E402
from gpu_plan.limits import is_running  # noqa: E402
from gpu_plan.plan import BLOCK_SECONDS, Bench, Step, StepFailed, StepSkipped, judge, run_step, sources  # noqa: E402
from gpu_plan.selftests import Order, Run, follow  # noqa: E402
from gpu_plan.steplog import Result, StepLog  # noqa: E402

# A self-test that writes two results. Before the second one it reads what the first one left on disk.
SELFTEST = """
import json, os, pathlib, sys, time, zlib
log, nonce, sequence = pathlib.Path(sys.argv[1]), sys.argv[2], 0
def frame(**document):
    global sequence
    body = json.dumps(document)
    print(f"ENVBUILD {nonce} {sequence} {zlib.crc32(body.encode()):08x} {body}", flush=True)
    sequence += 1
def probe(name, **more):
    frame(kind="probe", probe=name, status="passed", seconds=0.1, reason=None, traits={}, figures=[], **more)
frame(kind="start", torch="2.11.0")
probe("first")
until = time.monotonic() + 60
while "first" not in log.read_text() and time.monotonic() < until:
    time.sleep(0.01)
probe("second", on_disk="first" in log.read_text())
ENDING
"""


def order(log: Path, ending: str, name: str = "run") -> Order:
    nonce = "0123456789abcdef" * 2
    return Order(name, [sys.executable, "-c", SELFTEST.replace("ENDING", ending), str(log), nonce], nonce, {})


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    for name in ("results", "scratch"):
        (tmp_path / name).mkdir()
    return Bench(None, tmp_path / "results", tmp_path / "scratch")


def step(function: Callable[[Bench], None], name: str = "one", block: int = 1) -> Step:
    return Step(name, block, 60, "for a test", function)


def done(bench: Bench, function: Callable[[Bench], None], seconds: float = 60) -> Result:
    run_step(step(function), bench, seconds)
    return bench.log.results()["one"]


def running(bench: Bench, ending: str) -> Result:
    return done(bench, lambda given: judge(given.run(order(given.folder / "block-1.jsonl", ending))))


def test_each_result_is_on_disk_before_the_next_probe_begins(bench: Bench) -> None:
    result = running(bench, 'frame(kind="end")')
    assert (result.verdict, result.reason, result.complete) == ("passed", "", True)
    assert result.runs["run"].outcomes["second"]["on_disk"]


@pytest.mark.parametrize(
    ("ending", "problem"),
    [
        ("os.kill(os.getpid(), 9)", "it ended after 2 probes with exit status -9"),
        ('print("ENVBUILD cut", flush=True)', "line 4 of its output is not a valid frame"),
        ('print("ENVBUILD cut", end="", flush=True)', "line 4 of its output is not a valid frame"),
        ('print(f"ENVBUILD {nonce} 3 00000000 {{}}", flush=True)', "line 4 of its output is not a valid frame"),
        ("sys.exit('no torch')", "exit status 1; its stderr ends: no torch"),
    ],
)
def test_a_run_that_is_cut_short_keeps_its_results_and_fails(bench: Bench, ending: str, problem: str) -> None:
    result = running(bench, ending)
    assert result.verdict == "failed" and problem in result.reason and problem in result.runs["run"].problem
    assert list(result.runs["run"].outcomes) == ["first", "second"]


def test_runs_side_by_side_are_kept_apart(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first")
    seen: list[str] = []
    runs = follow([order(log, 'frame(kind="end")', name) for name in "ab"], tmp_path, lambda name, _: seen.append(name))
    assert [(run.name, run.problem, len(run.frames)) for run in runs] == [("a", "", 4), ("b", "", 4)]
    assert sorted(seen) == ["a"] * 4 + ["b"] * 4


def test_a_plan_that_is_killed_leaves_what_it_saw_and_is_resumed(tmp_path: Path) -> None:
    """The plan is killed from outside. The second call runs the interrupted step again, but not the completed step."""
    code = """
import sys, time, tempfile
from pathlib import Path
import gpu_check
from gpu_plan.limits import is_running  # noqa: E402
from gpu_plan.plan import Bench, Step
out = Path(sys.argv[1])
def first(bench):
    bench.saw("once")
    print("first ran", flush=True)
def second(bench):
    bench.saw("half")
    if not (out / "resumed").exists():
        print("waiting", flush=True)
        time.sleep(60)
steps = [Step("machine", 1, 60, "", first), Step("libraries", 1, 60, "", second)]
bench = Bench(None, out, out)
results = gpu_check.run_plan(steps, bench, "again" in sys.argv)
sys.exit(gpu_check.code(steps, results))
"""
    environment = selftests.environment()

    def start(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(tmp_path), *more]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    with start() as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["first ran\n", "waiting\n"]
        process.kill()
    with (tmp_path / "block-1.jsonl").open("a") as file:
        file.write('{"step": "libraries", "kind": "sa')
    results = StepLog(tmp_path).results()
    assert (results["machine"].verdict, results["machine"].complete) == ("passed", True)
    left = results["libraries"]
    assert (left.verdict, left.reason, left.complete, left.saw) == ("failed", "cut off before its end", False, ["half"])
    assert "| machine | 1 | passed |" in (tmp_path / "page.md").read_text()
    (tmp_path / "resumed").touch()
    for more, expected in ((), ""), (("again",), "first ran\n"):
        with start(*more) as process:
            out, _ = process.communicate(timeout=60)
        assert (out, process.returncode) == (expected, 0)
    assert StepLog(tmp_path).results()["libraries"].saw == ["half"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["block-1.jsonl", "page.md", "resumed"]


# A program that forks a child in a separate session, as the self-test does with a probe. Both ignore these signals.
STUBBORN = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM): signal.signal(number, signal.SIG_IGN)
if os.fork() == 0: os.setsid()
os.write(1, b"%d\\n" % os.getpid())  # in one piece: both write into one pipe
time.sleep(60)
"""


def test_a_step_that_hangs_is_ended_with_all_that_it_started(bench: Bench) -> None:
    pids: list[int] = []

    def hang(_: Bench) -> None:
        with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            pids.extend(int(process.stdout.readline()) for _ in range(2))
            process.wait()

    begin = time.monotonic()
    result = done(bench, hang, seconds=4)
    assert time.monotonic() - begin < 20
    assert (result.verdict, result.reason, result.complete) == ("failed", "no end within 4 s", False)
    assert len(pids) == 2 and not any(map(is_running, pids))


def test_a_step_that_leaves_a_process_behind_fails(bench: Bench) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        result = done(bench, lambda _: print(subprocess.Popen(["sleep", "60"]).pid))
        assert (result.verdict, result.reason) == ("failed", "1 processes were left running")
        assert other.poll() is None
        other.kill()


def raising(error: Exception) -> Callable[[Bench], None]:
    def function(_: Bench) -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "verdict", "reason", "complete"),
    [
        (lambda bench: bench.saw("fine"), "passed", "", True),
        (raising(StepFailed("wrong")), "failed", "wrong", True),
        (raising(StepSkipped("no apex")), "skipped", "no apex", False),
        (raising(ZeroDivisionError("by zero")), "failed", "ZeroDivisionError: by zero", True),
    ],
)
def test_every_end_of_a_step_has_its_verdict(
    bench: Bench, function: Callable[[Bench], None], verdict: str, reason: str, complete: bool
) -> None:
    result = done(bench, function)
    assert (result.verdict, result.reason, result.complete) == (verdict, reason, complete)


def test_no_verdict_ends_the_plan_and_a_block_ends_in_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = [step(raising(StepFailed("wrong")), "machine"), step(lambda _: time.sleep(1), "libraries"),
            step(lambda _: None, "seeds"), step(lambda _: None, "apex", block=3)]  # fmt: skip
    monkeypatch.setattr(gpu_check, "BLOCK_SECONDS", 5.5)
    results = gpu_check.run_plan(plan, bench, again=False)
    assert {name: result.verdict for name, result in results.items()} == {
        "machine": "failed", "libraries": "passed", "seeds": "skipped", "apex": "passed"
    }  # fmt: skip
    assert results["seeds"].reason.startswith("no time left in block 1")


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (["passed", "skipped"], 0),
        (["skipped", "skipped"], gpu_check.NO_GPU),
        (["passed", "failed"], gpu_check.FAILED),
        (["skipped", "failed"], gpu_check.FAILED),
        ([], gpu_check.NO_GPU),
    ],
)
def test_the_exit_code_depends_on_the_verdicts(verdicts: list[str], code: int) -> None:
    chosen = [step(lambda _: None, str(index)) for index in range(2)]
    results = {str(index): Result(str(index), verdict=verdict) for index, verdict in enumerate(verdicts)}
    assert gpu_check.code(chosen, results) == code


def test_a_result_of_other_sources_is_not_complete(bench: Bench) -> None:
    ran: list[str] = []
    plan = [step(lambda _: ran.append("ran"), "machine")]
    for _ in range(2):
        gpu_check.run_plan(plan, bench, again=False)
    assert ran == ["ran"]
    file = bench.folder / "block-1.jsonl"
    file.write_text(file.read_text().replace(sources(), "0" * 12))
    gpu_check.run_plan(plan, bench, again=False)
    assert ran == ["ran", "ran"]


def test_results_that_no_longer_fit_fail_the_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steplog, "LARGEST", 1000)

    def talkative(given: Bench) -> None:
        for _ in range(5):
            given.saw("x" * 300)

    result = done(bench, talkative)
    assert result.verdict == "failed" and result.reason.startswith("TooLarge: the results of block 1 exceed")
    assert (bench.folder / "block-1.jsonl").stat().st_size < 1500


def test_the_plan_fits_its_blocks_and_the_tool() -> None:
    """The limits of all steps of a block but the last leave 50 s for the last. At most 8 files are returned."""
    for block in (1, 2, 3):
        *before, last = [item for item in steps.STEPS if item.block == block]
        assert sum(item.limit for item in before) + 50 <= BLOCK_SECONDS, last.name
    assert [item.block for item in steps.STEPS] == sorted(item.block for item in steps.STEPS)
    assert (
        len({"page.md", steps.FINGERPRINT, steps.CLOCKS, *(f"block-{item.block}.jsonl" for item in steps.STEPS)}) <= 8
    )


def run_of(name: str = "quick-cold", **outcomes: Any) -> Run:
    base = {"kind": "probe", "seconds": 1.0, "reason": None, "figures": [], "traits": {}, "failure": None}
    frames = [{**base, "probe": probe.replace("_", "."), **fields} for probe, fields in outcomes.items()]
    return Run(name, [{"kind": "start", "torch": "2.11.0"}, *frames, {"kind": "end"}])


PASSED, SKIPPED, BROKEN = ({"status": status} for status in ("passed", "skipped", "failed"))


@pytest.mark.parametrize(
    ("run", "error"),
    [
        (run_of(gemm_exact=PASSED, conv=SKIPPED), None),
        (run_of(gemm_exact=PASSED, conv={**BROKEN, "reason": "wrong\nmore"}), "quick-cold: conv failed: wrong"),
        (run_of(gemm_exact=SKIPPED), "every probe was skipped"),
        (Run("full", problem="it ended"), "full: it ended"),
    ],
)
def test_a_run_is_judged_by_its_probes(run: Run, error: str | None) -> None:
    if error is None:
        return judge([run])
    with pytest.raises((StepFailed, StepSkipped), match=re.escape(error)):
        judge([run])


def test_a_result_that_should_repeat_and_does_not_is_named() -> None:
    runs = [run_of(name, gemm_exact={**PASSED, "traits": {"sha256": name}}) for name in "ab"]
    assert selftests.differences(runs) == ["gemm.exact: sha256 (b)"]
    assert selftests.differences(runs[:1] * 2) == []


def test_the_page_has_every_step_and_what_was_seen() -> None:
    results = {
        "machine": Result("machine", "new", "passed", "", 3.0, True, ["cuInit: 0.30 s cold"]),
        "full": Result(
            "full", "old", "failed", "conv failed:\nwrong", 9.0, True, [], {"full": run_of("full", conv=BROKEN)}
        ),
    }
    lines = list(summary.page("NVIDIA H100", "a machine", steps.STEPS, results, "new"))
    assert len([line for line in lines if re.match(r"\| [a-z0-9-]+ \| [123] \|", line)]) == len(steps.STEPS)
    assert "- cuInit: 0.30 s cold" in lines and "- failed: conv failed: wrong" in lines
    assert any("failed (with other sources: old)" in line for line in lines)
    assert "| conv | 1.00 | failed | - |" in lines and "torch 2.11.0" in lines[2]


QUERIED = """
==============NVSMI LOG==============
Driver Version                            : 580.159.04
GPU 00000000:00:05.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Serial Number                         : 1650123456789
    GPU UUID                              : GPU-11111111-2222-3333-4444-555555555555
    GPU PDI                               : 0x1234567890abcdef
    Board Part Number                     : 692-2G520-0200-000
    Clocks
        SM                                : 1980 MHz
    Processes
        Process ID                        : 4242
"""


def test_identifiers_of_a_gpu_are_not_kept() -> None:
    kept = steps.without_identity(QUERIED)
    assert "1980 MHz" in kept and "580.159.04" in kept
    for private in ("1650123456789", "GPU-1111", "0x1234", "692-2G520", "4242"):
        assert private in QUERIED and private not in kept


def test_no_record_holds_a_uuid(bench: Bench) -> None:
    result = done(
        bench, lambda given: given.saw("doctor: GPU-11111111-2222-3333-4444-555555555555 at 00000000:00:05.0")
    )
    assert result.saw == ["doctor: GPU-(UUID) at 00000000:00:05.0"]


def test_samples_of_the_clocks_are_summed_up() -> None:
    row = "2026/11/22 18:00:00.000, {}, 2619, {}, {}, 100, {}\n"
    text = "".join(
        row.format(*values) for values in ((345, 70.1, 30, "0x1"), (1980, 690.5, 61, "0x4"), (1500, 700, 65, "0xC"))
    )
    lines = list(steps.sampled(text))
    assert lines[0] == "clocks.sm: 345 to 1980 MHz, median 1500 of 3"
    assert lines[2].startswith("power.draw: 70.1 to 700 W")
    assert lines[-1] == "clocks were held by: idle, power cap, hardware slowdown"
    with pytest.raises(StepFailed, match="no samples"):
        list(steps.sampled('Field "x" is not a valid field to query.\n'))


def test_seeds_are_caught_missed_or_alarms() -> None:
    outcomes = run_of(
        a={**BROKEN, "failure": "bound", "reason": "off"}, b={**BROKEN, "failure": "exception", "reason": "died"},
        c=PASSED, d=SKIPPED, e=PASSED, f={**BROKEN, "failure": "bound", "reason": "alarm"},
    ).outcomes  # fmt: skip
    missed, other, alarms = steps.verdicts(dict.fromkeys("abcd", "bound"), ["e", "f"], outcomes)
    assert [line[:1] for line in missed] == ["c", "d"]
    assert other == ["b: failed exception: died"] and alarms == ["f: failed bound: alarm"]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put a program with this name and shell script on PATH, before all others."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def write(name: str, script: str) -> None:
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)

    return write


# A compute-sanitizer that writes a given log to the file of --log-file. It runs the probes, but not the control.
SANITIZER = """while [ "$1" != --log-file ]; do shift; done
case "$*" in
*out_of_bounds*) printf '%s' "{control}" > "$2" ;;
*) printf '%s' "{probes}" > "$2"; shift 2; exec "$@" ;;
esac"""
REPORTED, CLEAN = "= Invalid __global__ write of size 4\n= ERROR SUMMARY: 1 error\n", "= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("control", "probes", "reason"),
    [
        (REPORTED, CLEAN, ""),
        (CLEAN, CLEAN, "the kernel that writes out of bounds was not reported"),
        ("", CLEAN, "the kernel that writes out of bounds was not reported"),
        (REPORTED, REPORTED, "compute-sanitizer reports 1 errors"),
        (REPORTED, "", "compute-sanitizer wrote no summary"),
    ],
)
def test_the_sanitizer_must_report_its_control(
    bench: Bench,
    tool: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    control: str,
    probes: str,
    reason: str,
) -> None:
    tool("compute-sanitizer", SANITIZER.format(control=control, probes=probes))
    played = order(bench.folder / "block-1.jsonl", 'frame(kind="end")').command
    monkeypatch.setattr(selftests, "program", lambda *arguments: [*played, *arguments])
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0123456789abcdef" * 2)
    result = done(bench, steps.sanitizer)
    assert result.verdict == ("failed" if reason else "passed") and result.reason.startswith(reason)


def test_a_gpu_without_the_sanitizer_is_skipped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert done(bench, steps.sanitizer).reason == "compute-sanitizer is not on PATH"


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHECKOUT / "benchmarks" / "gpu_check.py"), *arguments],
        env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_without_a_gpu_nothing_is_written(tmp_path: Path) -> None:
    ran = command("--out", str(tmp_path), PATH="/nonexistent")
    assert (ran.returncode, ran.stderr) == (4, "no GPU: nvidia-smi lists none\n") and not list(tmp_path.iterdir())


def test_a_gpu_is_found_by_nvidia_smi_and_has_its_folder(tmp_path: Path, tool: Callable[[str, str], None]) -> None:
    tool("nvidia-smi", "echo 'NVIDIA H100 80GB HBM3'")
    out = tmp_path / "out"
    ran = command("--out", str(out), "--steps", "apex", "--block", "3")
    assert ran.returncode == 4 and "skipped  apex: no source of apex" in ran.stdout, ran.stderr
    assert sorted(file.name for file in (out / "nvidia-h100-80gb-hbm3").iterdir()) == ["block-3.jsonl", "page.md"]


def test_the_list_has_every_step_with_its_block_and_limit() -> None:
    lines = command("--list").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[str(item.block), item.name] for item in steps.STEPS]


def test_the_committed_facts_are_those_of_the_package() -> None:
    """The committed facts are copied to machines that lack the libraries for reading the package's own facts."""
    assert json.loads(selftests.EXPECTED.read_text(encoding="utf-8")) == gpu_check.expected()


def test_the_committed_libraries_are_those_of_the_lock() -> None:
    """After a new lock, run gpu_check.py --write-expected where its wheels are in the store."""
    lock = yaml.safe_load((CHECKOUT / "profiles" / f"{locked_files.PROFILE}.lock.yaml").read_text(encoding="utf-8"))
    known = locked_files.read()
    assert known["lock"] == lock["id"]
    locked = {f"{wheel['name']}=={wheel['version']}" for wheel in lock["content"]["wheels"]}
    assert set(known["wheels"]) <= locked and set(known["missing"]) <= locked
    assert any(path.endswith("libcublas.so.13") for path in known["wheels"]["nvidia-cublas==13.1.0.3"])


def test_installed_libraries_are_compared_byte_by_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "one-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: one\nVersion: 2.0\n")
    (tmp_path / "same.so").write_bytes(b"same")
    (tmp_path / "other.so").write_bytes(b"other")
    monkeypatch.syspath_prepend(str(tmp_path))
    known = {"same.so": "CWfGfGNq9Zq25ZFpn6SQ8VCnI6zyE25uGGdU6QSuXZo", "other.so": "x", "none.so.1": "x"}
    known["same.so"] = locked_files.file_hash(tmp_path / "same.so")
    found = list(locked_files.compare({"wheels": {"one==1.0": known, "not-here==1": {"a.so": "x"}}}))
    assert [str(item) for item in found] == [
        "one==1.0 (version 2.0 is installed): 1 of 3 libraries identical; 1 different: other.so; 1 missing: none.so.1",
        "not-here==1: not installed",
    ]


def test_the_lock_is_read_with_its_wheels_and_keeps_what_is_known(tmp_path: Path) -> None:
    import zipfile

    def wheel(name: str) -> dict[str, str]:
        return {"name": name, "version": "1", "file": f"{name}.whl", "sha256": name * 8}

    (tmp_path / ("a" * 8)).mkdir()
    with zipfile.ZipFile(tmp_path / ("a" * 8) / "a.whl", "w") as archive:
        archive.writestr("a-1.dist-info/RECORD", "a/b.so.1,sha256=abc_,5\na/b.py,sha256=x,1\na-1.dist-info/RECORD,,\n")
    lock = {"id": "sha256:1", "content": {"wheels": [wheel(name) for name in "abc"]}}
    made = locked_files.expected(lock, tmp_path, {"wheels": {"b==1": {"b.so": "y"}}})
    assert made["wheels"] == {"a==1": {"a/b.so.1": "abc_"}, "b==1": {"b.so": "y"}} and made["missing"] == ["c==1"]


@pytest.mark.parametrize(
    ("chains", "line"),
    [
        ({"lost": [[1, 127]], "interval": [128, 128]}, "promoted after 128 products; lost at [[1, 127]]"),
        ({"lost": [[1, 125]], "interval": [126, 129]}, "promoted after 126 to 129 products; lost at"),
        ({"lost": [[1, 1038]], "interval": None}, "not promoted within 520 products; lost at"),
        ({"lost": [], "interval": None}, "every product is kept; fraction bits kept: 13 in same instruction"),
    ],
)
def test_a_map_of_chains_is_put_into_a_line(chains: dict[str, Any], line: str) -> None:
    measured = {"out": "bfloat16", "fast": False, "shape": [272, 1040, 304], "bits": {"same": 13, "another": None}}
    head = "272x1040x304 to bfloat16, without fast accumulation: "
    assert steps.chains({**measured, **chains}).startswith(head + line)


# A self-test with a probe in a separate session, which does not keep the self-test's stdout open. ENDING is replaced by
# what the self-test does at SIGTERM.
TERMINATED = """
import os, signal, sys, time
child = os.fork()
if child == 0:
    os.setsid()
    os.close(1)
    time.sleep(10)  # longer than the test takes
    os._exit(0)
def end(*_):
    ENDING
signal.signal(signal.SIGTERM, end)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("os.kill(child, 9); os.waitpid(child, 0); os._exit(143)", ""),
        ("os.kill(child, 9); os.waitpid(child, 0); os._exit(0)", "exit status 0 after SIGTERM, should be 143"),
        ("os._exit(143)", "0.5 s later 1 processes are left"),
    ],
)
def test_an_interrupted_self_test_must_leave_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, ending: str, reason: str
) -> None:
    script = TERMINATED.replace("ENDING", ending)
    monkeypatch.setattr(selftests, "program", lambda *_: [sys.executable, "-c", script])
    begin = time.monotonic()
    monkeypatch.setattr(steps, "under_way", lambda *_: time.monotonic() > begin + 1)
    monkeypatch.setattr(steps, "_GONE_SECONDS", 0.5)
    result = done(bench, steps.sigterm)
    assert result.verdict == ("failed" if reason else "passed") and result.reason.startswith(reason)


SETUP = """
from setuptools import Extension, setup
setup(name="played", ext_modules=[Extension(name, [f"{name}.c"]) for name in MODULES])
"""


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_two_of_apex_modules_are_compiled_and_no_other(tmp_path: Path) -> None:
    def build(*modules: str) -> subprocess.CompletedProcess[str]:
        for name in modules:
            (tmp_path / f"{name}.c").write_text("int one(void) { return 1; }\n" if name != "syncbn" else "no C\n")
        (tmp_path / "setup.py").write_text(SETUP.replace("MODULES", repr(modules)))
        command = selftests.program("gpu_plan.apex_build", str(tmp_path))
        return subprocess.run(command, env=selftests.environment(), capture_output=True, text=True, check=False)

    lacking = build("amp_C", "syncbn")
    assert lacking.returncode == 1 and "does not compile fused_layer_norm_cuda" in lacking.stderr
    done = build("amp_C", "fused_layer_norm_cuda", "syncbn")
    assert done.returncode == 0, done.stderr
    assert sorted(file.name.partition(".")[0] for file in tmp_path.glob("*.so")) == ["amp_C", "fused_layer_norm_cuda"]


@pytest.mark.parametrize(
    ("status", "verdict"),
    [(BROKEN, "passed"), (PASSED, "failed"), (SKIPPED, "skipped")],
    ids=["seen", "missed", "skip"],
)
def test_forced_tf32_must_be_seen(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, status: dict[str, str], verdict: str
) -> None:
    bench.gpu = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(Bench, "run", lambda *_: [run_of(tf32_mode=status)])
    assert done(bench, steps.tf32_override).verdict == verdict


def test_a_process_that_cannot_hold_the_memory_fails_the_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "program", lambda *_: ["false"])
    assert done(bench, steps.memory_held).reason == "the process that holds the memory ended with exit status 1"


def test_clocks_are_sampled_only_while_the_step_runs(
    bench: Bench, tool: Callable[[str, str], None], tmp_path: Path
) -> None:
    row = "2026/11/22 18:00:00.000, 1980, 2619, 650.1, 61, 100, 0x4"
    tool("nvidia-smi", f"while :; do echo '{row}'; read -t 0.1 <> <(:); done")
    file = tmp_path / "clocks.csv"

    def sample(given: Bench) -> None:
        with steps.sampling(file):
            while not file.stat().st_size:
                time.sleep(0.01)

    result = done(bench, sample)
    assert result.verdict == "passed", result.reason
    assert next(iter(steps.sampled(file.read_text()))).startswith("clocks.sm: 1980 to 1980 MHz")


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        ([{"unexpected": 0}, {"refused": "no kernel"}], "passed"),
        ([{"unexpected": 2}, {"unexpected": 0}], "failed"),
        ([{"refused": "no kernel"}], "skipped"),
    ],
)
def test_all_chains_are_recorded_before_the_verdict(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, measured: list[dict[str, Any]], verdict: str
) -> None:
    bench.gpu = "NVIDIA H100 80GB HBM3"
    base = {"out": "bfloat16", "fast": True, "shape": [1, 2, 3], "lost": [], "interval": None, "bits": {}}
    monkeypatch.setattr(Bench, "output", lambda *_: "\n".join(json.dumps({**base, **line}) for line in measured))
    result = done(bench, steps.fp8)
    assert (result.verdict, len(result.saw)) == (verdict, len(measured))


def test_the_fingerprint_is_compared_with_another_gpus_that_is_committed(tmp_path: Path) -> None:
    for name in ("out/h100", "committed/h100", "committed/h200"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / steps.FINGERPRINT).write_text("{}")
    found = steps.other_fingerprints(tmp_path / "out" / "h100", tmp_path / "committed")
    assert found == [tmp_path / "committed" / "h200" / steps.FINGERPRINT]


def test_results_begin_as_what_is_committed_of_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    committed = tmp_path / "gpu" / "nvidia-h200"
    committed.mkdir(parents=True)
    (committed / "page.md").write_text("before")
    folder = gpu_check.folder_for(tmp_path / "out", "NVIDIA H200")
    assert folder == tmp_path / "out" / "nvidia-h200" and (folder / "page.md").read_text() == "before"
    (folder / "page.md").write_text("now")
    gpu_check.folder_for(tmp_path / "out", "NVIDIA H200")
    assert ((folder / "page.md").read_text(), (committed / "page.md").read_text()) == ("now", "before")


@pytest.mark.parametrize(
    ("shares", "verdict", "reason"),
    [((0.1, 0.05), "passed", ""), ((), "failed", "no comparison of conv was measured")],
)
def test_every_probe_must_have_compared_something(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, shares: Sequence[float], verdict: str, reason: str
) -> None:
    figures = [[{"dtype": "float16", "beyond_rounding": share} for share in found] for found in ((0.2, 0.3), shares)]
    run = run_of(
        gemm_accuracy={**PASSED, "figures": figures[0]}, conv={**PASSED, "figures": figures[1]}, attention_flash=SKIPPED
    )
    run.seconds = 1000
    monkeypatch.setattr(Bench, "run", lambda *_: [run])
    result = done(bench, steps.rounding_errors)
    assert (result.verdict, result.reason) == (verdict, reason)
    if not reason:
        assert (
            result.saw[0]
            == "gemm.accuracy float16: largest error beyond rounding 30.0% of tolerance (2 sets of inputs)"
        )


@pytest.mark.parametrize(
    ("used", "reason"),
    [
        ([10, 10, 3000, 90], ""),
        ([10, 3000, 5000, 5000], "0.5 s later 0 processes are left; MiB in use: 10 before, 5000 now"),
        ([], "nvidia-smi does not say how much memory is in use: ''"),
    ],
)
def test_memory_of_the_gpu_must_be_free_after_sigterm(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tool: Callable[[str, str], None], used: list[int], reason: str
) -> None:
    bench.gpu = "NVIDIA H100 80GB HBM3"
    answers = iter(used)
    last = used[-1] if used else ""
    monkeypatch.setattr(steps, "nvidia_smi", lambda *_: f"{next(answers, last)}\n")
    script = TERMINATED.replace("ENDING", "os.kill(child, 9); os.waitpid(child, 0); os._exit(143)")
    monkeypatch.setattr(selftests, "program", lambda *_: [sys.executable, "-c", script])
    monkeypatch.setattr(steps, "_GONE_SECONDS", 0.5)
    monkeypatch.setattr(steps, "_BURNING_SECONDS", 1.0)
    result = done(bench, steps.sigterm)
    assert result.reason == reason and result.verdict == ("failed" if reason else "passed")


def test_the_page_on_probes_says_what_the_committed_results_of_an_h200_say() -> None:
    page = " ".join(
        (selftests.ROOT / "docs" / "selftest.md")
        .read_text(encoding="utf-8")
        .partition("## What an H200 showed")[2]
        .split()
    )
    results = StepLog(selftests.ROOT / "benchmarks" / "results" / "gpu" / "nvidia-h200").results()
    run = results["standard-1"].runs["standard-1"]
    assert run.with_status("failed") == ["attention.cudnn"]
    assert f"{len(run.with_status('passed'))} probes passed, {len(run.with_status('skipped'))} skipped" in page
    assert f"{run.seconds:.0f} s on a fresh machine" in page
    assert f"took {results['standard-2'].runs['standard-2'].seconds:.0f} s on the second run" in page
    hardware = results["hardware"].runs["hardware"].outcomes
    assert hardware["burn"]["status"] == hardware["memory"]["status"] == "passed"
    assert f"busy for {hardware['burn']['seconds']:.0f} s" in page
    assert f"in {hardware['memory']['seconds']:.0f} s" in page
    identical = [line for line in results["libraries"].saw if line.startswith("nvidia-")]
    assert f"NVIDIA's {len(identical)} libraries were identical" in page
    assert all(re.search(r": ([0-9]+) of \1 libraries identical$", line) for line in identical)
    assert "caught: " not in results["seeds"].saw[0] and results["seeds"].saw[0].startswith(
        "91 of 92 seeded faults caught"
    )
    assert "Of 92 seeded faults, 91 were detected" in page
    assert any("promoted after 126 to 129 products" in line for line in results["fp8-chains"].saw)
    (after,) = re.findall(r"exit status 143 ([0-9.]+) s after SIGTERM", " ".join(results["sigterm"].saw))
    assert f"exit status 143 after {float(after):.1f} s" in page


def test_results_name_no_folder_of_the_machine(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    log.append("quick", 1, "saw", text=f'File "{selftests.ROOT}/a.py" of {sys.prefix}/bin/python')
    assert log.results()["quick"].saw == ['File "(checkout)/a.py" of (python)/bin/python']
    committed = selftests.ROOT / "benchmarks" / "results" / "gpu"
    folders = re.compile(r"/(?:work|home|opt)/[a-z]")
    assert not [file.name for file in committed.rglob("*.*") if folders.search(file.read_text(encoding="utf-8"))]
