"""The runner of this machine: which Python it uses, its results, and what a real run reports about the torch of that
Python."""

from __future__ import annotations

import json
import secrets
import shlex
import sys
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.runners import host_runner
from envbuild.testrun import selftest_job
from envbuild.testrun.run_result import RawOutput
from envbuild.testrun.selftest_job import Job, Limits
from envbuild.util.errors import UsageError
from envbuild.util.host_processes import run
from unit.support import envbuild, lock_for, lock_of_this_python, plan_of


def given(code: str, timeout: float = 30) -> Job:
    return Job("", ("python", "-c", code), b"the payload", "0" * 32, Limits(1 << 30, timeout))


def test_an_interpreter_is_found_by_path_or_in_its_environment(tmp_path: Path) -> None:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python3").symlink_to(sys.executable)
    assert host_runner.find_interpreter(sys.executable) == Path(sys.executable)
    assert host_runner.find_interpreter(str(tmp_path / "venv")) == tmp_path / "venv" / "bin" / "python3"


@pytest.mark.parametrize(
    ("path", "words"),
    [(".", "is not an environment"), ("no/such", "not a working Python"), ("/bin/true", "not a working Python")],
)
def test_a_path_that_is_not_a_python_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        host_runner.find_interpreter(path)


def test_lines_come_as_they_are_written_and_the_payload_as_a_file() -> None:
    lines: list[bytes] = []
    code = "import sys; print('one'); print(open(sys.argv[1]).read(), end=''); print('x', file=sys.stderr); sys.exit(5)"
    output = host_runner.run_on_host(Path(sys.executable), given(code), lines.append)
    assert lines == [b"one", b"the payload"]
    assert (output.stdout, output.stderr, output.exit_code) == (b"one\nthe payload", "x\n", 5)


def test_output_before_a_timeout_is_returned() -> None:
    """Both streams are returned: the last lines show where the program hung."""
    code = "import sys, time; print('one', flush=True); print('hung here', file=sys.stderr, flush=True); time.sleep(60)"
    output = host_runner.run_on_host(Path(sys.executable), given(code, 3))
    assert (output.stdout, output.exit_code, output.timed_out) == (b"one\n", None, True)
    assert output.stderr == "hung here\n"


def test_a_process_that_writes_too_much_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_runner, "MAX_STDOUT", 1000)
    output = host_runner.run_on_host(Path(sys.executable), given("while True: print('x' * 99)"))
    assert (output.too_long, output.timed_out) == (True, False)
    assert len(output.stdout) == 1000


def test_its_files_are_removed() -> None:
    code = "import tempfile; print(tempfile.mkdtemp())"
    output = host_runner.run_on_host(Path(sys.executable), given(code))
    assert not Path(output.stdout.decode().strip()).exists()


# the command, with the Python that runs the tests


@pytest.fixture
def locked(project: Path) -> Lock:
    return lock_of_this_python(project)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the first job, and give its output to each later job, which must be the same job."""
    real = host_runner.run_on_host
    jobs: list[Job] = []
    outputs: list[RawOutput] = []

    def run_or_replay(python: Path, job: Job, on_line: Callable[[bytes], None]) -> RawOutput:
        if not jobs:
            jobs.append(job)
            outputs.append(real(python, job, on_line))
        else:
            for line in outputs[0].stdout.splitlines():
                on_line(line)
        assert job == jobs[0]
        return outputs[0]

    monkeypatch.setattr(host_runner, "run_on_host", run_or_replay)
    monkeypatch.setattr(secrets, "token_hex", lambda size: "0" * 2 * size)


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/docker.sock")


@pytest.mark.slow
def test_an_environment_that_is_as_locked_passes(project: Path) -> None:
    """The profile's script is not in the results, because nobody requested it."""
    (project / "tests").mkdir()
    (project / "tests" / "smoke.py").write_text("raise AssertionError('it ran')", encoding="utf-8")
    locked = lock_of_this_python(project, selftest={"level": "quick", "script": "../tests/smoke.py"})
    done = envbuild("test", "sample", "--python", sys.executable, "--probe", "env.libs", "--json")
    assert done.code == 0, done.stderr
    assert [(row["name"], row["state"]) for row in done.document["probes"]] == [("env.libs", "passed")]
    subject = {
        key: done.document[key]
        for key in ("profile", "lock", "image", "interpreter", "torch", "device", "level", "seed")
    }
    assert subject == {
        "profile": "sample", "lock": locked.id, "image": None, "interpreter": sys.executable,
        "torch": metadata.version("torch"), "device": "cpu", "level": "quick", "seed": 1,
    }  # fmt: skip
    assert locked.versions["pip"] == "1.0", "the tools' versions do not count"


@pytest.mark.slow
def test_a_seed_is_drawn_recorded_and_shown_with_the_command_that_repeats_it(locked: Lock, replayed: None) -> None:
    """The command with the seed starts the same job."""
    command = ("test", "sample", "--python", sys.executable, "--probe", "env.libs", "--json", "--seed")
    drawn = envbuild(*command, "random")
    seed = drawn.document["seed"]
    assert len({seed, *(selftest_job.drawn_seed() for _ in range(2))}) == 3
    repeating = shlex.join(["envbuild", *command, str(seed)])
    assert f"seed {seed} was drawn; to repeat this run: {repeating}" in drawn.stderr
    assert envbuild(*command, str(seed)).document["seed"] == seed


@pytest.mark.parametrize(("arguments", "words"), [
    (["--seed", "0"], "'0' is neither a whole number above zero nor random"),
    (["--seed", "any"], "'any' is neither"),
    (["--seed", "random", "--resume", "job"], "leave out --seed"),
])  # fmt: skip
def test_a_seed_that_means_nothing_is_refused(project: Path, arguments: list[str], words: str) -> None:
    done = envbuild("test", "sample", *arguments)
    assert done.code == 2 and words in done.stderr


def test_python_s_own_variables_count(locked: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs in this environment would import a different torch before the installed one."""
    (tmp_path / "torch.py").write_text("raise ImportError('the shadow')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = envbuild("test", "sample", "--python", sys.executable, "--probe", "env.libs")
    assert done.code == 5
    assert "torch cannot be imported" in done.stderr and "the shadow" in done.stderr


@pytest.mark.slow
def test_an_environment_that_is_not_as_locked_fails(locked: Lock, project: Path) -> None:
    text = (project / "profiles" / "sample.yaml").read_text(encoding="utf-8")
    (project / "profiles" / "sample.yaml").write_text(text.replace('"packages": []', '"packages": ["nosuch==1"]'))
    made = lock_for(plan_of(project, json.loads((project / "profiles" / "sample.yaml").read_text(encoding="utf-8"))))
    lock_file.write(made, project / "profiles" / "sample.lock.yaml", "sample")
    done = envbuild("test", "sample", "--python", sys.executable, "--probe", "env.libs")
    assert (done.code, "nosuch is absent, but 1 is locked" in done.stderr) == (5, True)


def test_a_python_without_torch_is_reported_once(locked: Lock, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    run([sys.executable, "-m", "venv", "--without-pip", bare], timeout=60)
    done = envbuild("test", "sample", "--python", str(bare))
    assert (done.code, done.stdout) == (5, "")
    assert done.stderr.count("torch cannot be imported by") == 1
    assert done.stderr.splitlines()[-1].endswith("No module named 'torch'")


@pytest.mark.slow
def test_output_and_notes_of_the_profiles_script_are_shown(project: Path, replayed: None) -> None:
    (project / "tests").mkdir()
    (project / "tests" / "smoke.py").write_text("print('loss \\x1b[2J nan'); fail('a note'); raise ValueError('late')")
    lock_of_this_python(project, selftest={"script": "../tests/smoke.py"})
    command = ("test", "sample", "--python", sys.executable, "--probe", "own.script")
    done = envbuild(*command)
    assert done.code == 5, done.stderr
    assert "    a note\n    Traceback" in done.stdout
    assert "    own.script printed:\n      loss \ufffd[2J nan\n" in done.stdout
    (result,) = envbuild(*command, "--json").document["probes"]
    assert result["output"] == "loss \ufffd[2J nan"
    assert result["detail"].startswith("a note\n")


@pytest.mark.slow
def test_a_script_that_is_left_out_is_reported(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its level, the job runs one probe, and own.script if it contains a script."""
    of_level = selftest_job.document

    def document(*arguments: Any) -> dict[str, object]:
        found = of_level(*arguments)
        assert (found["level"], found["probes"]) == ("quick", None)
        script = [] if found["own"] == {"shapes": [], "script": None} else [selftest_job.OWN_SCRIPT]
        return {**found, "probes": ["gemm.exact", *script]}

    monkeypatch.setattr(selftest_job, "document", document)
    (project / "tests").mkdir()
    (project / "tests" / "smoke.py").write_text("raise AssertionError('it ran')", encoding="utf-8")
    lock_of_this_python(project, selftest={"script": "../tests/smoke.py"})
    words = "runs outside a container only with --probe own.script"
    done = envbuild("test", "sample", "--python", sys.executable, "--level", "quick", "--junit", "j.xml", "--json")
    assert done.code == 0, done.stderr
    first, row = done.document["probes"]
    assert (first["name"], first["state"]) == ("gemm.exact", "passed")
    assert (row["name"], row["state"], row["reason"]) == ("own.script", "skipped", words)
    assert words in (project / "j.xml").read_text(encoding="utf-8")


def test_an_image_and_an_environment_are_two_things() -> None:
    assert envbuild("test", "sample", "--python", sys.executable, "--image", "x").code == 2


# the self-test's zip without envbuild


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--list"], "gemm.exact "), (["--probe", "gemm.exact"], "passed   gemm.exact")],
)
def test_the_zip_is_a_program(tmp_path: Path, arguments: list[str], words: str) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "selftest.zip"
    file.write_bytes(selftest_job.selftest_zip())
    assert zipfile.is_zipfile(file)
    done = run([sys.executable, "-I", file, *arguments], timeout=60)
    assert done.code == 0, done.stderr
    assert words in done.stdout


def test_the_zip_reports_a_missing_torch(tmp_path: Path) -> None:
    file = tmp_path / "selftest.zip"
    file.write_bytes(selftest_job.selftest_zip())
    for arguments in (["--list"], []):
        done = run([sys.executable, "-I", "-S", file, *arguments], timeout=60)
        assert (done.code, done.stdout) == (4, "")
        assert done.stderr.startswith(f"torch cannot be imported by {sys.executable}: No module named 'torch'")
