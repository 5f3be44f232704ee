"""A profile's own shapes and script: they run like other probes, and each kind of failure is distinguished."""

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest

from selftest.reading import ROOT, Frame, environment, job, outcomes, read, run

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.project_test_spec_reader import AttentionSpec, ProjectTestSpec
from envbuild.selftest.harness.script_tracebacks import FOLDER
from envbuild.selftest.probes.attention import attention_backend_probes
from selftest import scripts, torch_fork_server

SHAPE = {"m": 3, "k": 7, "n": 5, "dtype": "bf16"}


@pytest.fixture(scope="module")
def frames_by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Frame]:
    given = job(threads=2, own={"script": {"name": "replaced.py", "text": ""}})
    folder, temporary = tmp_path_factory.mktemp("scripts"), tmp_path_factory.mktemp("temporary")
    frames, status, err = run("scripts", given, folder / "frames", TMPDIR=str(temporary))
    assert status == 5
    folders = [path.name for path in temporary.iterdir() if path.name.startswith(FOLDER)]
    return {**outcomes(frames), "run": {"stderr": err, "folders": folders}}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(scripts.RIGHT))
def test_a_script_that_comes_to_its_end_passes(frames_by_name: dict[str, Frame], name: str) -> None:
    frame = frames_by_name[name]
    assert frame["status"] == "passed", frame
    digest = hashlib.sha256(scripts.RIGHT[name].encode()).hexdigest()
    assert frame["traits"] == {"name": f"{name}.py", "sha256": digest}


@pytest.mark.parametrize(
    ("name", "failure", "at", "words"),
    [
        ("exit-3", "exit", "leaving", "the script ended with exit(3)"),
        ("exit-words", "exit", None, "the script ended: no licence"),
        ("exit-blank", "exit", None, "the script ended with exit(' ')"),
        ("fails-without-words", "exception", None, "fail() takes one string"),
        ("fails-with-blanks", "exception", None, "fail() takes one string"),
        ("exit-true", "exit", None, "the script ended with exit(True)"),
        ("os-exit-0", "incomplete", "leaving", "exited with status 0, but sent 0 results"),
        ("os-exit-4", "exit", None, "exited with status 4"),
        ("raises", "exception", "doing", "ValueError: one is two"),
        ("raises-long", "exception", None, "ValueError: xxx"),
        ("syntax", "exception", None, "SyntaxError"),
        ("nul", "exception", None, "null bytes"),
        ("fails", "mismatch", "one", "first (and 1 more)"),
        ("fails-and-exits", "mismatch", None, "found it"),
        ("fails-then-raises", "exception", "one", "ValueError: late"),
        ("fails-then-crashes", "signal", None, "died of SIGSEGV"),
        ("fails-forever", "signal", None, "died of SIGABRT"),
        ("thread", "mismatch", None, "a note"),
        ("fails-long", "mismatch", "s" * 500, "f" * 500),
        ("loops", "hang", "looping", "no end after 1 s"),
        ("crashes", "signal", "reading", "died of SIGSEGV"),
        ("killed", "oom", "dying", "killed"),
        ("forges", "incomplete", None, "exited with status 0"),
    ],
)
def test_each_failure_of_a_script_is_distinguished(
    frames_by_name: dict[str, Frame], name: str, failure: str, at: str | None, words: str
) -> None:
    frame = frames_by_name[name]
    assert (frame["status"], frame["failure"], frame["at"]) == ("failed", failure, at), frame
    assert words in frame["reason"]
    assert len(frame["reason"]) < 4000


def test_a_script_leaves_no_folder_after_any_ending(frames_by_name: dict[str, Frame]) -> None:
    """Some scripts die by a signal, or are killed at their time limit."""
    assert frames_by_name["run"]["folders"] == []


def test_no_script_is_left_untested(frames_by_name: dict[str, Frame]) -> None:
    assert set(frames_by_name) - {"run"} == {*scripts.RIGHT, *scripts.WRONG}
    (mark,) = (m for m in test_each_failure_of_a_script_is_distinguished.pytestmark if m.name == "parametrize")  # type: ignore[attr-defined]
    assert {row[0] for row in mark.args[1]} == set(scripts.WRONG)


def test_the_position_in_a_script_is_reported(frames_by_name: dict[str, Frame]) -> None:
    assert 'loops.py", line 3 in forever' in frames_by_name["loops"]["detail"]
    assert 'raises.py", line 3, in inner' in frames_by_name["raises"]["detail"]
    assert 'crashes.py", line 1' in frames_by_name["crashes"]["detail"]


def test_a_scripts_stacks_have_its_own_frames_alone_under_its_own_name(frames_by_name: dict[str, Frame]) -> None:
    details = {name: frame["detail"] or "" for name, frame in frames_by_name.items() if name != "run"}
    assert {name for name, detail in details.items() if "File " in detail} >= {"raises", "syntax", "loops", "crashes"}
    ours = str(ROOT / "envbuild") + os.sep  # wherever the checkout lies
    for detail in details.values():
        files = re.findall(r'File "([^"]+)"', detail)
        assert not [file for file in files if file.startswith(ours) or FOLDER in file or "runpy" in file], detail
        assert "Extension modules" not in detail
    assert details["raises"].splitlines()[:2] == [
        "Traceback (most recent call last):",
        '  File "raises.py", line 4, in <module>',
    ]
    assert details["syntax"].splitlines()[1] == '  File "syntax.py", line 1'
    assert '/ctypes/__init__.py", line' in details["crashes"], "frames of the library that it called are shown"
    assert details["thread"] == "a note" and 'File "thread.py", line 3, in work' in frames_by_name["thread"]["output"]


def test_notes_survive_the_end_of_the_script(frames_by_name: dict[str, Frame]) -> None:
    assert frames_by_name["fails-then-raises"]["detail"].startswith("a note\nTraceback")
    assert frames_by_name["fails-then-crashes"]["detail"].startswith("a note\nFatal Python error: Segmentation fault")
    assert (
        "\nnote 99\n" in frames_by_name["fails-forever"]["detail"]
        and "note 100" not in frames_by_name["fails-forever"]["detail"]
    )


def test_the_output_of_a_script_is_separate_from_its_results(frames_by_name: dict[str, Frame]) -> None:
    assert b"xxxxx" in frames_by_name["run"]["stderr"]
    assert frames_by_name["noise"]["output"].endswith("from the script")
    assert len(frames_by_name["noise"]["output"]) <= 8192
    assert [frames_by_name[name]["output_cut"] for name in ("noise", "thread", "empty")] == [True, False, False]
    assert [frames_by_name[name]["output"] for name in ("fails-then-raises", "fails-then-crashes", "empty")] == [
        "a word", "a word", None,
    ]  # fmt: skip
    assert "a word" not in frames_by_name["fails-then-crashes"]["detail"]


def by_job(**fields: Any) -> tuple[int, dict[str, Frame]]:
    """Run the self-test with a job document."""
    function = "envbuild.selftest.__main__:command"
    text = json.dumps(job(**fields)).encode()
    done = torch_fork_server.run(function, [["--job", "-"]], environment(), input=text, timeout=120)
    assert done.stdout, done.stderr
    return done.returncode, outcomes(read(done.stdout.encode()))


@pytest.mark.slow
def test_a_job_brings_shapes_and_a_script() -> None:
    own = {
        "shapes": [{**SHAPE, "bias": True}, {**SHAPE, "layout": "tt"}],
        "script": {"name": "smoke.py", "text": "step('one')\nfail('no')"},
    }
    status, found = by_job(own=own, require=["own.script"], probes=["gemm.crash", "own.script"])
    assert (status, list(found)) == (5, ["gemm.crash", "own.script"])
    cases = [figure["case"] for figure in found["gemm.crash"]["figures"]]
    assert cases[:2] == ["own linear bf16 3x7x5 bias", "own matmul bf16 3x7x5 tt"]
    assert cases[2].startswith("pytorch#133548")
    assert (found["own.script"]["status"], found["own.script"]["reason"]) == ("failed", "no")


@pytest.mark.slow
def test_a_job_brings_shapes_of_attention() -> None:
    shape = {"heads": 3, "length": 77, "depth": 40, "dtype": "bf16"}
    own = {"shapes": [SHAPE, shape, {**shape, "causal": True, "dtype": "fp32"}]}
    status, found = by_job(own=own, probes=["gemm.crash", "attention.math", "attention.flash"])
    assert status == 0, {name: (frame["reason"], frame["detail"]) for name, frame in found.items()}
    for name in ("attention.math", "attention.flash"):
        figures = found[name]["figures"][:8]
        assert [figure["shape"] for figure in figures] == [[4, 3, 77, 40]] * 8
        assert [figure["dtype"] for figure in figures] == ["bfloat16"] * 4 + ["float32"] * 4
        assert figures[4]["case"] == "random causal"
    assert found["gemm.crash"]["figures"][0]["case"] == "own matmul bf16 3x7x5 nn"


def test_a_wrong_result_of_an_own_shape_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    context = with_own(monkeypatch, lambda *given, **how: SDPA(*given, **how) + 1)
    assert context.faults[0].reason.startswith("random own fp32 4x1x70x32: element")


def test_an_own_shape_that_no_kernel_takes_is_a_fault_of_the_math_path_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(q: torch.Tensor, *given: torch.Tensor, **how: Any) -> torch.Tensor:
        if q.shape[-1] == 32:
            raise RuntimeError("No available kernel. Aborting execution.")
        return SDPA(q, *given, **how)

    with pytest.raises(RuntimeError, match="No available kernel"):
        with_own(monkeypatch, refuses)
    context = with_own(monkeypatch, refuses, "flash")
    assert (context.faults, list(context.traits["unsupported"])) == ([], ["flash own fp32 4x1x70x32"])


SDPA = F.scaled_dot_product_attention


def with_own(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., torch.Tensor], backend: str = "math") -> Context:
    """Run attention.<backend> with this kernel, for a small shape of the profile and for another shape."""
    cases = attention_backend_probes.attention_shapes
    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    monkeypatch.setattr(
        attention_backend_probes, "attention_shapes", lambda context: itertools.islice(cases(context), 2)
    )
    monkeypatch.setattr(attention_backend_probes, "_tell", lambda context, backend: None)
    context = Context(
        JobDocument("0" * 32, own=ProjectTestSpec(attentions=(AttentionSpec(1, 70, 32, "float32", False),)))
    )
    attention_backend_probes.check_backend(context, backend)
    return context


@pytest.mark.slow
def test_a_script_that_is_asked_for_and_not_brought_is_skipped() -> None:
    status, found = by_job(probes=["own.script"])
    assert (status, found["own.script"]["status"]) == (0, "skipped")
    assert found["own.script"]["reason"] == "needs a script in the profile"
