from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import pytest

from envbuild.profile.model import SelfTest
from envbuild.profile.project_test_shapes_and_script import Script, Shape
from envbuild.testrun import run_result, selftest_job
from envbuild.testrun.output_judge import judge_output
from envbuild.testrun.run_result import RunFailure
from envbuild.testrun.selftest_job import Expectations, RunRequest
from unit.evidence.runs import NAMES, NONCE, documents, judged, line, lines, output, passed_run, probe

ON_CPU = Expectations({}, "3.11")

Lines = list[bytes]


def refused(run: run_result.TestRun, words: str) -> None:
    assert not run.passed
    assert words in "; ".join(run.errors)
    assert run.summary().passed == 0
    assert any(words in failure.detail for failure in run.failures())


def test_a_whole_run_passes() -> None:
    run = judged(lines(documents()), NAMES)
    assert run.passed
    assert run.errors == ()
    assert run.by_status("passed") == list(NAMES)
    assert run.summary() == run_result.SelfTestSummary(3, 0, 0, 1.5, ())
    assert run.start["torch"] == "2.13.0"
    assert run.environment["libraries"] == []


def test_other_output_between_the_frames_is_ignored() -> None:
    found = [part for frame in lines(documents()) for part in (frame, b"a warning of torch\n", b"\xff\xfe\n", b"\n")]
    assert judged(found, NAMES).passed


def test_a_failed_probe_fails_the_run_and_is_named() -> None:
    run = judged(lines(documents(probe("env.libs"), probe("gemm.crash", "failed"))), exit_code=5)
    assert not run.passed
    assert run.errors == ()
    (failure,) = run.failures()
    assert failure == RunFailure(
        "gemm.crash", "SIGFPE", "cublas-hopper-fpe", "signal at a step: why", "signal", "a step", "why"
    )


def staged(**changes: Any) -> dict[str, Any]:
    """Return a failure of dist.staged in which nccl fails and gloo passes."""
    traits = {"layer": "nccl", "workaround": None, "nccl": "2.21.5", "card": "NVIDIA H20", "compute_capability": "9.0"}
    given = {"failed_step": "init", "unequal_cards": "no", **changes.pop("traits", {})}
    return probe("dist.staged", "failed", **{"signal": None, **changes, "traits": {**traits, **given}})


@pytest.mark.parametrize(
    ("result", "advisory"),
    [
        (staged(failure="signal", signal="SIGSEGV", traits={"nccl": "2.18.1"}), "nccl-2.18.1"),
        (staged(failure="mismatch", traits={"nccl": "2.18.1"}), "nccl-2.18.1"),
        (staged(failure="mismatch", traits={"nccl": "2.18.1", "unequal_cards": "yes"}), "nccl-unequal-cards"),
        (staged(failure="hang", traits={"nccl": "2.20.5", "unequal_cards": "yes"}), "nccl-unequal-cards"),
        (staged(failure="hang", traits={"nccl": "2.20.5"}), None),
        (staged(failure="signal", signal="SIGSEGV"), None),
        (staged(failure="mismatch", traits={"nccl": "2.18.1", "layer": "image"}), None),
        (
            staged(
                failure="exception", traits={"failed_step": "all_reduce bf16 1001", "workaround": "NCCL_NVLS_ENABLE=0"}
            ),
            "nccl-bf16-misaligned-h100",
        ),
        (staged(failure="hang", traits={"failed_step": "leave"}), "nccl-abort-hang"),
        (staged(failure="hang", traits={"failed_step": "leave", "nccl": "2.27.7"}), None),
        (staged(failure="exception", traits={"nccl": "2.27.5"}), "nccl-2.27-fp8-symmetric"),
        (staged(failure="exception", traits={"nccl": "2.27.5", "compute_capability": "10.0"}), None),
        (staged(failure="hang", traits={"nccl": "2.29.2"}), "nccl-2.28.3-2.29.2"),
        (
            staged(failure="hang", traits={"workaround": "NCCL_P2P_DISABLE=1", "card": "NVIDIA GeForce RTX 4090"}),
            "nccl-4090-p2p",
        ),
        (staged(failure="hang", traits={"card": "NVIDIA GeForce RTX 4090"}), None),
        (staged(failure="hang", traits={"workaround": "NCCL_P2P_DISABLE=1"}), None),
    ],
)
def test_a_failure_between_gpus_is_named_by_what_the_probe_tried(result: dict[str, Any], advisory: str | None) -> None:
    (failure,) = judged(lines(documents(result)), exit_code=5).failures()
    assert failure.advisory == advisory


def swap(found: Lines) -> Lines:
    return [found[0], found[2], found[1], *found[3:]]


def recoded(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Lines], Lines]:
    """Return the run that a changed harness would write, with every frame complete."""

    def spoil(found: Lines) -> Lines:
        made = documents()
        change(made)
        return lines(made)

    return spoil


def numbered(text: bytes) -> Callable[[Lines], Lines]:
    """Return the run with a different number in the second frame."""
    return lambda found: [found[0], found[1].replace(b" 1 ", b" " + text + b" ", 1), *found[2:]]


def body(number: int, content: bytes) -> Callable[[Lines], Lines]:
    return lambda found: [*found[:number], line(content, number), *found[number + 1 :]]


DEEP = b'{"kind":"probe","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
SPOILED: dict[str, tuple[Callable[[Lines], Lines], str]] = {
    "nothing": (lambda found: [], "no frame of this run"),
    "only noise": (lambda found: [b"all tests passed\n"], "no frame of this run"),
    "forged without a nonce": (
        lambda found: [b'ENVBUILD {"kind":"end"}\n', b"all passed\n"],
        "belongs to a different run",
    ),
    "first missing": (lambda found: found[1:], "frame 0 of the self-test's output is missing"),
    "one missing": (lambda found: [*found[:2], *found[3:]], "frame 2 of the self-test's output is missing"),
    "end missing": (lambda found: found[:-1], "is incomplete"),
    "doubled": (lambda found: [*found[:2], found[1], *found[2:]], "is missing; frame 1 came instead"),
    "doubled whole": (lambda found: found + found, "frame"),
    "out of order": (swap, "is missing"),
    "cut in the last": (lambda found: [*found[:-1], found[-1][:-8]], "damaged"),
    "cut in the middle": (lambda found: [*found[:2], found[2][:40] + b"\n", *found[3:]], "damaged"),
    "a bit flipped": (lambda found: [found[0], found[1].replace(b"quick", b"quicj"), *found[2:]], "damaged"),
    "a wrong sum": (lambda found: [found[0], line(b"{}", 1, crc=1), *found[2:]], "damaged"),
    "another nonce": (
        lambda found: [f.replace(NONCE.encode(), b"f" * 32) for f in found],
        "belongs to a different run",
    ),
    "one of another run": (lambda found: [*found, line(b"{}", 6, "f" * 32)], "belongs to a different run"),
    "no sum": (lambda found: [found[0], f"ENVBUILD {NONCE} 1 zz {{}}\n".encode(), *found[2:]], "damaged"),
    "no number": (numbered(b"one"), "damaged"),
    "a negative number": (numbered(b"-1"), "frame -1 came"),
    "a giant number": (numbered(b"9" * 5000), "damaged"),
    "a list": (body(1, b"[]"), "damaged"),
    "a text": (body(1, b'"probe"'), "damaged"),
    "null": (body(1, b"null"), "damaged"),
    "no JSON": (body(1, b"{passed}"), "damaged"),
    "bytes": (body(1, b"\xff\xfe"), "damaged"),
    "deep": (body(1, DEEP), "damaged"),
    "a giant integer": (body(1, b'{"kind":"probe","seconds":' + b"9" * 5000 + b"}"), "damaged"),
    "after the end": (lambda found: [*found, line(b'{"kind":"probe"}', 6)], "continues after its end"),
    "two ends": (recoded(lambda d: d.append(d[-1])), "continues after its end"),
    "two starts": (recoded(lambda d: d.insert(1, d[0])), "is incomplete, or continues"),
    "no start": (recoded(lambda d: d.pop(0)), "no frame of this run"),
    "a probe that was not planned": (recoded(lambda d: d[0].update(probes=["env.libs"])), "not the planned"),
    "a planned probe that did not run": (recoded(lambda d: d[0]["probes"].append("more")), "not the planned"),
    "a probe twice": (recoded(lambda d: d.insert(2, d[1])), "not the planned probes"),
    "too many in the end": (recoded(lambda d: d[-1].update(passed=4)), "contradicts"),
    "too few in the end": (recoded(lambda d: d[-1].update(probes=2)), "contradicts"),
    "failures only in the end": (recoded(lambda d: d[-1].update(passed=2, failed=1)), "contradicts"),
    "no counts": (recoded(lambda d: d[-1].pop("failed")), "invalid frame"),
    "counts that are not numbers": (recoded(lambda d: d[-1].update(passed="3")), "invalid frame"),
    "an unknown status": (recoded(lambda d: d[1].update(status="PASSED")), "invalid frame"),
    "a status with more": (recoded(lambda d: d[1].update(status="passed\nx")), "invalid frame"),
    "no status": (recoded(lambda d: d[1].pop("status")), "invalid frame"),
    "a probe without a valid name": (recoded(lambda d: d[1].update(probe=5)), "invalid frame"),
    "a name without end": (recoded(lambda d: d[1].update(probe="x" * 1000)), "invalid frame"),
    "figures that are none": (recoded(lambda d: d[1].update(figures="many")), "invalid frame"),
    "a start without probes": (recoded(lambda d: d[0].pop("probes")), "invalid frame"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_output_never_passes_and_says_why(case: str) -> None:
    spoil, words = SPOILED[case]
    for code in (0, 5):
        refused(judged(spoil(lines(documents())), exit_code=code), words)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_an_invalid_number_is_refused(number: bytes) -> None:
    found = lines(documents())
    content = json.dumps(probe("env.libs")).encode().replace(b"0.25", number)
    assert not judged([found[0], line(content, 1), *found[2:]]).passed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exit_code": 139, "stderr": "x\nSegmentation fault"}, "exit code 139: Segmentation fault"),
        ({"exit_code": 137}, "exit code 137"),
        ({"exit_code": 137, "out_of_memory": True}, "ran out of memory"),
        (
            {"exit_code": 1, "stderr": "Traceback\nModuleNotFoundError: torch"},
            "exit code 1: ModuleNotFoundError: torch",
        ),
        ({"exit_code": 2}, "exit code 2"),
        ({"exit_code": 127}, "exit code 127"),
        ({"exit_code": -9}, "exit code -9"),
        ({"exit_code": None, "timed_out": True, "seconds": 900.2}, "stopped after 900 s"),
        ({"exit_code": None}, "exit code None"),
        ({"exit_code": 137, "too_long": True}, "too long"),
        ({"exit_code": 0, "too_long": True}, "too long"),
        ({"exit_code": 0, "timed_out": True}, "stopped after"),
    ],
)
def test_an_odd_end_never_passes_and_says_what_happened(changes: dict[str, Any], words: str) -> None:
    refused(judged(lines(documents()), **changes), words)


@pytest.mark.parametrize(("status", "code"), [("passed", 5), ("skipped", 5), ("failed", 0)])
def test_an_exit_code_that_contradicts_the_frames_never_passes(status: str, code: int) -> None:
    found = lines(documents(probe("env.libs"), probe("gemm.crash", status)))
    refused(judged(found, exit_code=code), f"exit code {code}, which contradicts its results")


STOPPED: dict[str, Any] = {"exit_code": None, "timed_out": True, "seconds": 900.2}


@pytest.mark.parametrize("done", range(len(NAMES)))
def test_a_run_that_was_stopped_names_the_probe_that_was_running(done: int) -> None:
    planned, *rest = [document for document in documents() if document["kind"] in ("start", "probe")]
    run = judged(lines([planned, *rest[:done]]), **STOPPED)
    assert run.by_status("passed") == list(NAMES[:done])
    assert run.by_status("failed") == [NAMES[done]]
    first, *others = run.failures()
    reason = "the probe did not end; the whole self-test was stopped after 900 s"
    assert first == RunFailure(NAMES[done], None, None, f"hang: {reason}", "hang", None, reason)
    assert [failure.probe for failure in others] == [None] * len(run.errors)
    refused(run, "the self-test was stopped after 900 s")


def test_a_run_that_was_stopped_after_its_last_probe_names_none() -> None:
    run = judged(lines(documents()), **STOPPED)
    assert run.by_status("failed") == []
    refused(run, "the self-test was stopped after 900 s")


@pytest.mark.parametrize(
    "probes",
    [
        None,
        5,
        "gemm",
        ["gemm\x1b[2J"],
        {"a": 1},
        [5, None],
        [["a"]],
    ],
)
def test_a_stopped_run_may_have_printed_anything(probes: object) -> None:
    """An image's output is not trusted, also not after a timeout."""
    start = {**documents()[0], "probes": probes}
    refused(judged(lines([start]), **STOPPED), "the self-test was stopped after 900 s")


def test_a_skipped_required_probe_is_reported_and_not_as_a_failure() -> None:
    found = lines(documents(probe("env.libs"), probe("gemm.crash", "skipped"), probe("train.step", "skipped")))
    run = judged(found, ["env.libs", "gemm.crash"])
    assert run.passed
    assert (run.errors, run.failures()) == ((), [])
    assert run.skipped_required == ("gemm.crash",)
    assert (run.summary().passed, run.summary().skipped) == (1, 2)
    assert judged(found, ["env.libs"]).skipped_required == ()


def test_a_required_probe_that_is_absent_is_an_error() -> None:
    run = judged(lines(documents(probe("env.libs"))), ["env.libs", "gemm.crash"])
    refused(run, "required probe gemm.crash is not among the results")
    assert (len(run.errors), run.skipped_required) == (1, ())


def test_a_required_probe_that_failed_is_a_failure_and_no_fault_of_the_run() -> None:
    run = judged(lines(documents(probe("env.libs", "failed"))), ["env.libs"], exit_code=5)
    assert not run.passed
    assert run.errors == ()


def test_skipped_is_not_passed() -> None:
    run = judged(lines(documents(probe("env.libs", "skipped"))))
    assert not run.passed
    assert run.summary().skipped == 1


def test_each_fault_is_reported_once() -> None:
    run = judged([b"ENVBUILD bad\n"] * 1000)
    assert len(run.errors) == 2


def test_a_run_without_output_has_only_its_end_reported() -> None:
    run = judged(b"", ["env.libs"], exit_code=1, stderr="no python")
    refused(run, "exit code 1: no python")
    assert len(run.errors) == 1
    refused(judged(b"", ["env.libs"]), "no frame of this run")


def test_the_log_is_kept() -> None:
    assert judge_output(output(b"", stderr="the log"), NONCE, ()).log == "the log"


# the job


def test_the_job_says_what_is_expected() -> None:
    wanted = SelfTest(level="quick", require=("env.libs",), timeout=60, memory_gb=2)
    made = selftest_job.make_job("sha256:x", wanted, Expectations({"torch": "2.13.0"}, "3.11"))
    sizes, _, rest = made.stdin.partition(b"\n")
    first, second = (int(part) for part in sizes.split())
    assert len(rest) == first + second
    assert rest[:first] == selftest_job.selftest_zip()
    document = json.loads(rest[first:])
    assert document["nonce"] == made.nonce
    assert (document["level"], document["require"], document["probes"]) == ("quick", ["env.libs"], None)
    expect = {"distributions": {"torch": "2.13.0"}, "python": "3.11", "gpus": [], "gpu_count": 1, "transport": None}
    assert document["expect"] == expect
    assert (made.limits.memory, made.limits.timeout) == (2 << 30, 60.0)
    assert made.argv[:4] == ("python", "-I", "-S", "-c")


SHAPES = (Shape(m=2, k=3, n=4, dtype="bf16", bias=True),)
SCRIPT = Script("../smoke.py", "print('hello')\n")


def test_additions_of_a_profile_are_part_of_the_job() -> None:
    assert document_of(selftest_job.make_job("x", SelfTest(), ON_CPU))["own"] == {
        "shapes": [],
        "script": None,
    }
    document = document_of(selftest_job.make_job("x", SelfTest(shapes=SHAPES, script=SCRIPT), ON_CPU))
    shape = {"m": 2, "k": 3, "n": 4, "dtype": "bf16", "layout": "nn", "bias": True}
    assert document["own"] == {"shapes": [shape], "script": {"name": "smoke.py", "text": "print('hello')\n"}}


def test_the_selftest_takes_what_is_sent() -> None:
    """Sender and receiver of the job document share no code."""
    pytest.importorskip("torch")
    from envbuild.selftest.harness.job_document import parse

    made = selftest_job.make_job(
        "x", SelfTest(shapes=SHAPES, script=SCRIPT, require=("env.libs",)), Expectations({}, "3.11")
    )
    taken = parse(document_of(made), frozenset({"env.libs", "own.script", "burn"}))
    assert taken.require == ("env.libs", "own.script")
    (shape,) = taken.own.shapes
    assert (shape.m, shape.k, shape.n, shape.dtype, shape.layout, shape.bias) == (2, 3, 4, "bfloat16", "nn", True)
    assert taken.own.script
    assert (taken.own.script.name, taken.own.script.sha256) == ("smoke.py", SCRIPT.sha256)


def test_where_nothing_confines_it_a_script_runs_only_if_it_is_asked_for() -> None:
    wanted = SelfTest(shapes=SHAPES, script=SCRIPT, require=("env.libs",))
    assert selftest_job.on_host(wanted) == SelfTest(shapes=SHAPES, require=("env.libs",))
    assert selftest_job.on_host(wanted, RunRequest(probes=("gemm.crash",))).script is None
    assert selftest_job.on_host(wanted, RunRequest(probes=("own.script",))) == wanted


def test_a_script_that_is_brought_must_pass() -> None:
    assert selftest_job.required_probes(SelfTest(script=SCRIPT), gpu=False) == ["own.script"]
    assert selftest_job.required_probes(SelfTest(script=SCRIPT, require=("own.script", "env.libs")), gpu=True) == [
        "env.identity",
        "own.script",
        "env.libs",
    ]


def test_performance_requirements_are_in_the_job_and_in_the_proof() -> None:
    wanted = SelfTest.model_validate({"floor": {"gemm": 0.6}, "burn_seconds": 20, "level": "full"})
    document: Any = selftest_job.document(wanted, ON_CPU)
    assert (document["floors"], document["burn_seconds"]) == ({"gemm": 0.6}, 20)
    assert document["timeouts"]["burn"] > 20
    assert selftest_job.performance_requirements(wanted) == {"gemm": 0.6, "burn": 20.0}
    assert selftest_job.performance_requirements(SelfTest(burn_seconds=20)) == {}


def test_every_run_has_a_nonce_of_its_own() -> None:
    nonces = {selftest_job.make_job("x", SelfTest(), ON_CPU).nonce for _ in range(20)}
    assert len(nonces) == 20
    assert {len(nonce) for nonce in nonces} == {32}


def document_of(made: selftest_job.Job) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(made.stdin[made.stdin.index(b"\n") + 1 + len(selftest_job.selftest_zip()) :])
    return document


def test_several_gpus_are_asked_for_with_their_transport_and_room_for_it() -> None:
    wanted = SelfTest(require=("env.libs",), transport="p2p", memory_gb=16)
    made = selftest_job.make_job("x", wanted, Expectations({}, "3.11", ("NVIDIA H20",), 4), RunRequest(gpus=("1", "2")))
    document = document_of(made)
    assert (document["expect"]["gpu_count"], document["expect"]["transport"]) == (4, "p2p")
    assert document["require"] == ["env.identity", "env.libs", "dist.staged"]
    assert (made.devices, made.limits.shm) == (("1", "2"), 8 << 30)
    assert selftest_job.make_job("x", SelfTest(), ON_CPU).limits.shm == 1 << 30


@pytest.mark.parametrize(
    ("gpu", "count", "transport", "staged"),
    [(True, 4, None, True), (True, 1, "p2p", True), (True, 1, None, False), (False, 4, None, False)],
)
def test_gpus_that_work_together_must_be_shown_to(gpu: bool, count: int, transport: Any, staged: bool) -> None:
    names = selftest_job.required_probes(SelfTest(require=("env.libs",), transport=transport), gpu, gpu_count=count)
    assert ("dist.staged" in names) is staged


@pytest.mark.parametrize("cards", [(), ("NVIDIA H20",)])
def test_a_gpu_is_asked_who_it_is_before_all_else(cards: tuple[str, ...]) -> None:
    made = selftest_job.make_job(
        "x",
        SelfTest(require=("env.libs",)),
        Expectations({}, "3.11", cards, hardware={"driver": {"cuda": "580"}}),
    )
    document = document_of(made)
    assert made.gpus == bool(cards)
    assert document["device"] == ("cuda" if cards else "cpu")
    assert document["expect"]["gpus"] == list(cards)
    assert document["expect"]["driver"] == {"cuda": "580"}
    assert document["require"] == [*(["env.identity"] if cards else []), "env.libs"]


@pytest.mark.parametrize(
    ("run_request", "level", "probes", "require"),
    [
        (selftest_job.ALL, "standard", None, ["env.identity", "env.libs", "train.step"]),
        (RunRequest(level="quick"), "quick", None, ["env.identity", "env.libs"]),
        (RunRequest(level="full"), "full", None, ["env.identity", "env.libs", "train.step"]),
        (RunRequest(probes=("gemm.crash",)), "standard", ["gemm.crash"], ["gemm.crash"]),
        (RunRequest("quick", ("train.step", "train.step")), "quick", ["train.step"], ["train.step"]),
        (
            RunRequest("quick", fingerprint=True),
            "quick",
            None,
            ["env.identity", "env.libs", "fingerprint"],
        ),
        (
            RunRequest(probes=("a",), fingerprint=True),
            "standard",
            ["a", "fingerprint"],
            ["a", "fingerprint"],
        ),
    ],
)
def test_only_the_requested_probes_must_pass(
    run_request: RunRequest, level: str, probes: list[str] | None, require: list[str]
) -> None:
    wanted = SelfTest(level="standard", require=("env.libs", "train.step"))
    made = selftest_job.document(wanted, Expectations({}, "3.11", ["NVIDIA H20"]), run_request)
    assert (made["level"], made["probes"], made["require"]) == (level, probes, require)
    assert selftest_job.required_probes(wanted, True, run_request) == require


def test_the_zip_is_the_same_every_time_and_holds_the_sources_alone() -> None:
    first = selftest_job.selftest_zip()
    selftest_job.selftest_zip.cache_clear()
    assert selftest_job.selftest_zip() == first
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        names = archive.namelist()
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert "envbuild/selftest/__main__.py" in names
    assert {name for name in names if not name.startswith("envbuild/selftest/")} == {
        "__main__.py",
        "envbuild/__init__.py",
    }
    assert len(names) == len(set(names))


# Prints the file of each module of the self-test, and how many times Python compiled it.
COMPILATIONS = """
import atexit, builtins, collections, json, sys
real, counts = compile, collections.Counter()
def counted(source, filename, *arguments, **options):
    counts[filename] += 1
    return real(source, filename, *arguments, **options)
builtins.compile = counted
def report():
    files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "envbuild"]
    print(json.dumps({file: counts[file] for file in files}))
atexit.register(report)
"""


def test_python_compiles_each_module_of_the_selftest_at_most_once() -> None:
    """The entry stops at the invalid job, after its imports."""
    entry = "envbuild.selftest.inventory.environment_collector"
    argv = [sys.executable, "-I", "-S", "-c", COMPILATIONS + selftest_job.BOOTSTRAP, entry]
    done = subprocess.run(argv, input=selftest_job.bootstrap_payload(b"{}"), capture_output=True, timeout=120)
    assert b"invalid job" in done.stderr
    counts = json.loads(done.stdout)
    files = {name.partition("selftest.zip/")[2]: count for name, count in counts.items()}
    assert {"envbuild/selftest/inventory/__init__.py", "envbuild/selftest/inventory/elf_reader.py"} < set(files)
    assert set(files.values()) == {1}, "0 if its __file__ is wrong"


def test_the_id_is_of_the_sources(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(files: dict[str, str]) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        monkeypatch.setattr(selftest_job, "_SOURCES", folder)
        selftest_job.selftest_id.cache_clear()
        return selftest_job.selftest_id()

    base = of({"a.py": "1", "b/c.py": "2"})
    assert of({"a.py": "1", "b/c.py": "2", "notes.txt": "x"}) == base
    assert (
        len({base, of({"a.py": "2", "b/c.py": "2"}), of({"a.py": "12", "b/c.py": ""}), of({"a.py": "1", "c.py": "2"})})
        == 4
    )
    selftest_job.selftest_id.cache_clear()


def test_the_last_output_of_an_image_has_no_escape_sequences() -> None:
    run = judged(b"", exit_code=1, stderr="Traceback\n\x1b[2Jgone")
    assert run.errors[0] == "the self-test ended with exit code 1: \N{REPLACEMENT CHARACTER}[2Jgone"


def test_helpers_make_a_run_that_passes() -> None:
    assert passed_run().passed
