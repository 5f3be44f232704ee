"""The Slurm runner with stand-ins for sbatch, scontrol, squeue, scancel and docker; the script itself really runs."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envbuild.runners.runner_interface import RunnerError, Watch
from envbuild.runners.slurm import (
    job_folder_reader,
    outcome_file_and_start_failures,
    slurm_job_states,
    slurm_runner,
)
from envbuild.runners.slurm.outcome_file_and_start_failures import JobOutcome
from envbuild.runners.slurm.slurm_runner import Slurm
from envbuild.runners.slurm.slurm_settings import SlurmSite
from envbuild.testrun import output_judge
from envbuild.testrun.selftest_job import Limits
from envbuild.util import user_folders
from envbuild.util.errors import (
    EngineError,
    EnvbuildError,
    HungUp,
    Interrupted,
    NetworkError,
    NotProved,
    SystemFault,
    UsageError,
)
from envbuild.util.host_processes import ProcessMissing, ProcessTimeout, run
from unit.evidence.runs import NONCE, documents, lines, located, probe
from unit.runners.slurmprograms import IMAGE, JOB, TIMES, Stub

pytestmark = pytest.mark.skipif(not shutil.which("bash") or not shutil.which("timeout"), reason="no bash or coreutils")


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub(tmp_path)
    monkeypatch.setenv("STUB", str(made.folder))
    monkeypatch.setenv("PATH", f"{made.folder}{os.pathsep}{os.environ['PATH']}")
    for name, value in {"POLL": 0.05, "ASK": 0.1, "LEAVING": 1.0, "PATIENCE": 1.0}.items():
        monkeypatch.setattr(slurm_runner, name, value)
    return made


def fails(stub: Stub, kind: type[EnvbuildError] = RunnerError, **how: Any) -> EnvbuildError:
    with pytest.raises(kind) as caught:
        stub.run(**{"grace": 1, **how})
    return caught.value


def interrupted(stub: Stub, by: BaseException) -> BaseException:
    """Interrupt the runner at the first output line, and return the result."""

    def line(_: bytes) -> None:
        raise by

    site = SlurmSite(folder=str(stub.shared), grace=1)
    with pytest.raises((KeyboardInterrupt, EnvbuildError)) as caught:
        Slurm(site, IMAGE, None, "sample").run(JOB, Watch(line, stub.notes.append))
    return caught.value


def meanwhile(work: Callable[[], None], when: Callable[[], bool]) -> None:
    """Do the work in a thread, as soon as the condition holds."""

    def wait() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and not when():
            time.sleep(0.02)
        work()

    threading.Thread(target=wait, daemon=True).start()


def test_the_output_comes_back_and_says_where_it_was_made(stub: Stub) -> None:
    stub.say(words="a word\n", code="5")
    output = stub.run()
    assert output.stdout == b"".join(lines(documents())) == b"".join(line + b"\n" for line in stub.lines)
    assert (output.stderr, output.exit_code, output.timed_out) == ("a word\n", 5, False)
    assert stub.recorded("stdin") == "the payload"
    assert (located(output).job, located(output).node, located(output).engine) == ("42", "node-7", "docker 26.1.5")
    assert located(output).queued_seconds in (7.0, None)
    assert any("running on node-7, after 7 s in the queue" in notes for notes in stub.notes)
    assert stub.left() == [] and "rm --force" in stub.recorded("removed")


def test_the_container_is_confined_as_the_local_one(stub: Stub) -> None:
    stub.run()
    for option in ("--network none", "--cap-drop ALL", "--read-only", "no-new-privileges", "--pids-limit 4096",
                   f"--memory {1 << 30}", "--user 65534:65534", "--tmpfs /tmp:exec,mode=1777", "--init"):  # fmt: skip
        assert option in stub.recorded("ran")


def test_the_nodes_engine_may_know_the_image_by_its_manifest(stub: Stub) -> None:
    stub.say(has=IMAGE.handle)
    assert located(stub.run()).image == IMAGE.handle


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "ending"),
    [("CANCELLED", "cancelled"), ("TIMEOUT", "time-out"), ("NODE_FAIL", "node-failure"), ("PREEMPTED", "preempted"),
     ("OUT_OF_MEMORY", "memory"), ("COMPLETED", "no-output"), ("FAILED", "no-output")],
)  # fmt: skip
def test_a_job_that_left_nothing_is_reported_by_its_last_slurm_state(stub: Stub, state: str, ending: str) -> None:
    stub.say(hold="", state=state)
    error = fails(stub)
    assert isinstance(error, RunnerError) and (error.ending, error.code) == (ending, 6)
    assert stub.left() == []


def test_a_job_that_slurm_forgot_is_lost_never_passed(stub: Stub) -> None:
    stub.say(hold="", forgotten="")
    error = fails(stub)
    assert isinstance(error, RunnerError) and error.ending == slurm_job_states.LOST


def test_the_last_state_of_a_job_counts_after_slurm_forgot_it(stub: Stub) -> None:
    stub.say(hold="", state="NODE_FAIL")
    meanwhile(lambda: stub.say(forgotten=""), lambda: any("node_fail" in notes for notes in stub.notes))
    error = fails(stub)
    assert isinstance(error, RunnerError) and error.ending == "node-failure"


def test_an_outcome_counts_with_any_state_of_the_job(stub: Stub) -> None:
    """The self-test ended before the job was cancelled, or before Slurm forgot it."""
    stub.say(state="CANCELLED")
    assert stub.run().exit_code == 0
    stub.say(forgotten="")
    assert stub.run().exit_code == 0


def test_a_silent_controller_is_waited_for_and_then_the_job_is_left_alone(stub: Stub) -> None:
    stub.say(down="")
    assert stub.run().exit_code == 0  # its files exist nevertheless
    stub.say(hold="")
    error = fails(stub)
    assert (
        isinstance(error, RunnerError)
        and error.ending == "unknown"
        and error.hint == "when it answers again: --resume 42"
    )
    assert len(stub.left()) == 2 and not stub.recorded("cancelled")


def test_a_lost_waiting_process_is_resumed_once_and_only_by_the_same_job(stub: Stub) -> None:
    stub.say(hold="", down="")
    fails(stub)
    (stub.folder / "down").unlink()
    with pytest.raises(UsageError, match="was submitted with a different image"):
        stub.run(dataclasses.replace(JOB, stdin=b"another"), resume="42")
    (folder,) = stub.shared.glob("*")
    environment = {**os.environ, "SLURM_JOB_ID": "42"}
    done = run(["bash", folder / "job.sh"], env=environment)
    assert done.code == 0, done.stderr
    stub.say(forgotten="")
    assert stub.run(resume="42").stdout == b"".join(lines(documents()))
    with pytest.raises(UsageError, match="no job 42"):
        stub.run(resume="42")


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [lambda b: b[:-30], lambda b: b + b"x\n", lambda b: b.replace(b"passed", b"failed")])
def test_output_that_is_not_what_was_written_is_refused(stub: Stub, spoil: Callable[[bytes], bytes]) -> None:
    stub.say(hold="", down="")
    fails(stub)
    (stub.folder / "down").unlink()
    (folder,) = stub.shared.glob("*")
    run(["bash", folder / "job.sh"], env={**os.environ, "SLURM_JOB_ID": "42"})
    written = folder / "attempt-0" / "stdout"
    written.write_bytes(spoil(written.read_bytes()))
    stub.say(state="COMPLETED")
    error = fails(stub, resume="42")
    assert isinstance(error, RunnerError) and error.ending == "truncated"


@pytest.mark.slow
@pytest.mark.parametrize("year", [1980, 2099])
def test_a_nodes_clock_does_not_matter(stub: Stub, year: int) -> None:
    """The times written by the node are years off, and according to the controller the job starts before its
    submission."""
    stub.say(hold="", down="")
    fails(stub)
    (stub.folder / "down").unlink()
    (folder,) = stub.shared.glob("*")
    run(["bash", folder / "job.sh"], env={**os.environ, "SLURM_JOB_ID": "42"})
    seconds = datetime.datetime(year, 1, 1, tzinfo=datetime.UTC).timestamp()
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (seconds, seconds))
    assert stub.run(resume="42").exit_code == 0


def test_a_job_that_starts_before_it_is_submitted_did_not_wait() -> None:
    found = slurm_job_states.seen(
        "JobId=1 JobState=RUNNING Reason=None NodeList=n SubmitTime=2026-11-21T10:00:00 StartTime=2026-11-21T09:00:00"
    )
    assert found and found.queued == 0.0


# A job that waits

VAIN = ("PartitionTimeLimit", "PartitionNodeLimit", "BadConstraints", "AssocMaxWallDurationPerJobLimit", "InvalidQOS",
        "AssocMaxCpuPerJobLimit", "QOSMaxGRESPerJob", "QOSMaxMemoryPerNode", "QOSMinGRES", "AssocGrpCPUMinutesLimit",
        "QOSGrpWallLimit", "AccountNotAllowed", "launch_failed_requeued_held")  # fmt: skip
PASSES = ("Priority", "Resources", "AssocGrpGRES", "AssocGrpCpuLimit", "AssocGrpCPURunMinutesLimit", "Licenses",
          "QOSMaxJobsPerUserLimit", "QOSMaxCpuPerUserLimit", "ReqNodeNotAvail,_UnavailableNodes:n1", "JobHeldAdmin",
          "PartitionDown", "Reservation", "BeginTime", "None", "")  # fmt: skip


@pytest.mark.parametrize("reason", [*VAIN, *PASSES])
def test_only_what_never_passes_by_itself_is_not_waited_for(reason: str) -> None:
    assert (slurm_job_states.endless_wait(reason) is not None) is (reason in VAIN)


def test_a_job_that_slurm_can_never_start_ends_with_the_reason(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_job_states, "GRACE", 0.3)
    stub.say(hold="", state="PENDING", reason="PartitionTimeLimit")
    error = fails(stub, NotProved)
    assert "can never start job 42 (PartitionTimeLimit)" in error.message and "time=MINUTES" in error.message
    assert "{queue: MINUTES}" in str(error.hint) and "sinfo" in str(error.hint)
    assert stub.recorded("cancelled").startswith("--name=envbuild-sample-") and stub.left() == []


def test_a_job_waits_no_longer_than_its_queue(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_job_states, "GRACE", 0.3)
    stub.say(hold="", state="PENDING", reason="Priority")
    error = fails(stub, site=SlurmSite(queue=0))
    assert isinstance(error, RunnerError) and error.ending == "unschedulable" and "(Priority)" in error.message
    assert stub.recorded("cancelled") and stub.left() == []


def waits(state: str = "PENDING", reason: str = "Priority") -> slurm_job_states.Seen:
    return slurm_job_states.Seen(state, reason, "", 0, None)


def test_a_queue_is_counted_without_jobs_that_do_not_wait() -> None:
    short = slurm_job_states.Queue(1)
    assert short.ends("1", waits(), 0) is None and short.ends("1", waits(reason="BadConstraints"), 59) is None
    assert isinstance(short.ends("1", waits(), 60), RunnerError)
    assert short.ends("1", None, 70) is None and short.ends("1", waits("CONFIGURING"), 80) is None
    assert short.ends("1", waits(), 81) is None  # it is queued again


def test_a_reason_must_last_to_be_believed() -> None:
    long = slurm_job_states.Queue(None)
    assert long.ends("1", waits(reason="BadConstraints"), 0) is None
    assert long.ends("1", waits(), 10) is None
    assert long.ends("1", waits(reason="BadConstraints"), 20) is None
    assert long.ends("1", waits(reason="BadConstraints"), 49) is None
    assert isinstance(long.ends("1", waits(reason="BadConstraints"), 50), NotProved)
    assert long.ends("1", waits(), 10**7) is None


def test_another_jobs_output_does_not_count(stub: Stub) -> None:
    """The output is complete and of a passed run, but has a different nonce."""
    other = b"".join(lines(documents())).replace(NONCE.encode(), b"f" * 32)
    stub.frames(other)
    judged = output_judge.judge_output(stub.run(), NONCE, ("env.libs",))
    assert not judged.passed and judged.errors


def test_a_wrong_gpu_is_caught_by_the_identity_probe(stub: Stub) -> None:
    """Slurm assigns what gres.conf claims; the container sees the real GPU."""
    reason = "the card is NVIDIA A100-SXM4-80GB, not NVIDIA H20"
    frames = documents(probe("env.identity", "failed", failure="wrong", signal=None, reason=reason), probe("env.libs"))
    stub.frames(b"".join(lines(frames)))
    stub.say(gpus="0", code="5")
    job = dataclasses.replace(JOB, gpus=True, models=("h20",))
    judged = output_judge.judge_output(stub.run(job), NONCE, ("env.identity", "env.libs"))
    assert not judged.passed and reason in judged.failures()[0].detail
    assert '--gpus "device=0"' in stub.recorded("ran")


def test_a_node_that_allocates_no_gpu_is_not_proof(stub: Stub) -> None:
    stub.say(gpus="")
    with pytest.raises(NotProved, match="assigned no GPU on node-7"):
        stub.run(dataclasses.replace(JOB, gpus=True, models=("h20",)))


def test_a_part_of_a_gpu_is_not_proof(stub: Stub) -> None:
    stub.say(gpus="MIG-aa0ee3a9-7d4f-5a6c-b2a0-5a1c7a3f0e11")
    with pytest.raises(NotProved, match=r"MIG-aa0ee3a9.* on node-7, which is not a whole GPU"):
        stub.run(dataclasses.replace(JOB, gpus=True, models=("h20",)))


def test_a_missing_image_is_not_a_fault_of_the_image(stub: Stub) -> None:
    stub.say(no_image="")
    assert fails(stub, EngineError).message.startswith("node-7 has no image")
    registry = SlurmSite(registry="registry.example/team/h20")
    with pytest.raises(NetworkError, match="node-7 cannot fetch registry") as caught:
        stub.run(dataclasses.replace(JOB), registry, reference=f"registry.example/team/h20@sha256:{'3' * 64}")
    assert "connection refused" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("site", "program"),
    [(SlurmSite(container="podman"), "podman"), (SlurmSite(program="/usr/bin/nodocker"), "/usr/bin/nodocker"),
     (SlurmSite(container="apptainer", program="/no/apptainer", registry="r"), "/no/apptainer")],
)  # fmt: skip
def test_a_node_without_the_program_is_reported_without_blaming_the_image(
    stub: Stub, site: SlurmSite, program: str
) -> None:
    if program == "podman" and shutil.which("podman"):
        pytest.skip("this machine has podman")
    error = fails(stub, EngineError, site=site, reference=f"r/x@{IMAGE.id}" if site.registry else None)
    assert (error.message, error.code) == (f"node-7 has no program {program}", 6)
    assert "slurm: {program: PATH}" in str(error.hint) and "registry" not in str(error.hint)
    if site.container != "apptainer":
        again = fails(stub, EngineError, job=TOGETHER, site=dataclasses.replace(site, interface="ib0"))
        assert again.message.endswith(f" has no program {program}")


def test_the_error_of_the_nodes_engine_is_reported(stub: Stub) -> None:
    """The error is reported even if the engine does not answer."""
    (stub.folder / "docker").write_text("#!/bin/sh\necho Cannot connect to the Docker daemon >&2; exit 1\n")
    assert "Cannot connect to the Docker daemon" in str(fails(stub, EngineError).hint)


def test_an_engine_that_does_not_start_the_image_is_not_a_failed_test(stub: Stub) -> None:
    stub.frames(b"")
    stub.say(code="125", words="docker: Error: no space left on device")
    assert "no space left" in str(fails(stub, EngineError).hint)
    stub.say(words='docker: could not select device driver "" with capabilities: [[gpu]]')
    fails(stub, NotProved)


def test_a_self_test_that_does_not_end_is_stopped(stub: Stub) -> None:
    stub.say(hang="")
    output = stub.run(dataclasses.replace(JOB, limits=Limits(1 << 30, 1)))
    assert (output.timed_out, output.exit_code) == (True, None)
    assert output.stdout == b"".join(lines(documents())) and "rm --force" in stub.recorded("removed")


def test_too_little_memory_and_too_much_output_are_reported(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.say(oom="", code="137")
    assert stub.run().out_of_memory
    monkeypatch.setattr(slurm_runner, "MAX_STDOUT", 100)
    output = stub.run()
    assert output.too_long and len(output.stdout) == 100


def test_a_rejection_by_slurm_is_reported_in_its_words(stub: Stub) -> None:
    """No message says that the job cannot be cancelled, because no job exists. If sbatch timed out, a job may exist."""
    (stub.folder / "scancel").write_text("#!/bin/sh\necho no controller >&2; exit 1\n", encoding="utf-8")
    stub.say(refuse="Invalid account")
    error = fails(stub)
    assert isinstance(error, RunnerError) and (error.ending, error.code) == ("refused", 6)
    assert "Invalid account" in error.message and stub.notes == [] and stub.left() == []
    stub.say(refuse="Socket timed out on send/recv operation")
    fails(stub)
    assert any("could not be cancelled" in notes for notes in stub.notes) and stub.left() == []


def test_resources_that_slurm_lacks_are_reported_with_the_request(stub: Stub) -> None:
    stub.say(refuse="Requested node configuration is not available")
    configured = SlurmSite(partition="gpu", constraint="nvlink", folder=str(stub.shared))
    job = dataclasses.replace(JOB, gpus=True, models=("a100",), count=16)
    origins = {"partition": "--slurm", "constraint": "config.yaml:7"}
    with pytest.raises(RunnerError, match="node configuration is not available") as caught:
        Slurm(configured, IMAGE, None, "fleet", origins=origins).run(job, Watch())
    assert str(caught.value.hint).splitlines()[:4] == [
        "the job requested",
        "  gres gpu:a100:16 (the count: gpu_count of profile fleet; the name: the GPU's id, "
        "because slurm: {gres: ...} sets no name for a100)",
        "  partition gpu (--slurm)",
        "  constraint nvlink (config.yaml:7)",
    ]
    origins = {"gres.a100": "config.yaml:9"}
    site = dataclasses.replace(configured, gres={"a100": "gpu:nvidia_a100"})
    with pytest.raises(RunnerError) as named:
        Slurm(site, IMAGE, None, "fleet", origins=origins).run(job, Watch())
    assert "gres gpu:nvidia_a100:16 " in str(named.value.hint) and "the name: config.yaml:9)" in str(named.value.hint)


def test_a_folder_that_cannot_be_made_is_not_a_usage_error(stub: Stub) -> None:
    stub.shared.touch()
    error = fails(stub, SystemFault)
    assert "cannot be created" in error.message and (error.code, "{folder: ...}" in str(error.hint)) == (6, True)


def test_without_sbatch_the_error_states_where_to_run(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(stub.shared))
    error = fails(stub, ProcessMissing)
    assert (error.message, error.code) == ("sbatch is not installed or not on PATH", 6)
    assert "login node" in str(error.hint) and stub.left() == []


def test_a_job_that_sbatch_may_have_queued_is_cancelled(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch timed out, but the controller had accepted the job."""
    monkeypatch.setattr(slurm_runner, "_ANSWER", 1.0)
    (stub.folder / "sbatch").write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    with pytest.raises(ProcessTimeout):
        stub.run()
    assert stub.recorded("cancelled").startswith("--name=envbuild-sample-") and stub.left() == []


def test_a_controller_that_is_silent_hides_no_interruption(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_runner, "_ANSWER", 1.0)
    (stub.folder / "squeue").write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    stub.hang()
    assert isinstance(interrupted(stub, KeyboardInterrupt()), KeyboardInterrupt)
    assert any("may still run" in notes and "scancel --name=" in notes for notes in stub.notes) and stub.left() == []


def test_a_terminal_that_is_gone_leaves_the_job_to_be_resumed(stub: Stub) -> None:
    error = interrupted(stub, HungUp())
    assert isinstance(error, Interrupted) and error.code == 130 and "--resume 42" in str(error.hint)
    assert not stub.recorded("cancelled")
    assert stub.run(resume="42").exit_code == 0 and stub.left() == []


def test_tickets_that_other_processes_remove_are_not_a_fault(stub: Stub) -> None:
    (user_folders.state_folder("slurm") / "9.ticket.json").symlink_to("gone")
    assert stub.run().exit_code == 0


def test_an_interruption_cancels_the_job_and_removes_its_container(stub: Stub) -> None:
    stub.hang()
    assert isinstance(interrupted(stub, KeyboardInterrupt()), KeyboardInterrupt)
    assert stub.recorded("cancelled").startswith("--name=envbuild-sample-")
    assert stub.left() == []
    end = time.monotonic() + 30
    while "rm --force" not in stub.recorded("removed") and time.monotonic() < end:
        time.sleep(0.05)
    assert "rm --force" in stub.recorded("removed")


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["KILL", "folder"])
def test_a_container_outlives_neither_its_script_nor_its_folder(stub: Stub, signal: str) -> None:
    """Otherwise a node that lost its connection would continue a job that is no longer waited for."""
    stub.say(hang="", down="")
    fails(stub)
    assert "rm --force" not in stub.recorded("removed")
    if signal == "folder":
        shutil.rmtree(next(stub.shared.glob("*")))
    else:
        os.killpg(int(stub.recorded("pid")), 9)
    end = time.monotonic() + 60
    while "rm --force" not in stub.recorded("removed") and time.monotonic() < end:
        time.sleep(0.05)
    assert "rm --force" in stub.recorded("removed")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("JobState=PENDING Reason=Priority Restarts=0", "queued (Priority)"),
        ("JobState=PENDING Reason=BeginTime Restarts=1", "queued, for the second time (BeginTime)"),
        (f"JobState=RUNNING Reason=None NodeList=n1 {TIMES}", "running on n1, after 7 s in the queue"),
        ("JobState=RUNNING Reason=None NodeList=(null) SubmitTime=Unknown StartTime=N/A", "running"),
    ],
)
def test_the_description_of_a_job(text: str, sentence: str) -> None:
    found = slurm_job_states.seen(f"JobId=1 {text}\n")
    assert found and found.describe() == sentence


@pytest.mark.parametrize(
    ("state", "over"),
    [("PENDING", False), ("COMPLETING", False), ("POWER_UP_NODE", False), ("EXPEDITING", False), ("OF_TOMORROW", False),
     ("COMPLETED", True), ("FAILED", True), ("CANCELLED", True), ("BOOT_FAIL", True), ("REVOKED", True)],
)  # fmt: skip
def test_a_job_is_over_only_if_slurm_reports_it(state: str, over: bool) -> None:
    """To remove the files of a running job would end the job. The nodes of a job may take minutes to boot."""
    found = slurm_job_states.seen(f"JobId=1 JobState={state} Reason=None NodeList=n1\n")
    assert found and found.over is over


@pytest.mark.parametrize("text", ["", "JobId=1", "JobState= x", "JobState=\x1b[2J", "sbatch: JobStatePENDING"])
def test_unparsable_output_of_slurm_is_ignored(text: str) -> None:
    assert slurm_job_states.seen(text) is None


GOOD = {"stage": "run", "exit": "0", "seconds": "1", "oom": "false", "job": "1", "node": "n", "gpus": "",
        "engine": "d 1", "image": "x", "bytes": "1", "sha256": "0" * 64, "parts": "", "fabric": ""}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"stage": "other"}, {"exit": "-1"}, {"exit": "x"}, {"node": "\x1b"}, {"sha256": "0"}, {"more": "1"}, {"oom": ""},
     {"parts": "0"}, {"parts": "0:1,5:2"}, {"fabric": "maybe"}],
)  # fmt: skip
def test_a_malformed_outcome_is_refused(change: dict[str, str]) -> None:
    def text(values: dict[str, str]) -> str:
        return "".join(f"{key}={value}\n" for key, value in values.items())

    assert outcome_file_and_start_failures.parse_outcome(text(GOOD))
    assert outcome_file_and_start_failures.parse_outcome(text({**GOOD, **change})) is None


def test_an_outcome_of_many_nodes_with_long_names_is_read_whole(tmp_path: Path) -> None:
    names = ",".join(f"gpu-{number:03}.{'x' * 240}" for number in range(64))
    values = {**GOOD, "node": names, "parts": " ".join(["0:67108864"] * 64), "fabric": " ".join(["yes"] * 64)}
    text = "".join(f"{key}={value}\n" for key, value in values.items())
    (tmp_path / "outcome").write_text(text, encoding="utf-8")
    found = job_folder_reader.read_outcome(tmp_path)
    assert found and (found.node, len(found.parts), len(found.fabric)) == (names, 64, 64)


PYXIS = """pyxis: importing docker image: registry.example#team/h20
slurmstepd: error: pyxis: child 10028 failed with error code: 1
slurmstepd: error: pyxis: failed to import docker image
slurmstepd: error: pyxis:     [ERROR] Could not process JSON input
slurmstepd: error: pyxis: couldn't start container
"""


def test_an_image_that_pyxis_cannot_fetch_is_not_at_fault() -> None:
    """pyxis downloads the image at the start; the message is pyxis' own."""
    text = "".join(f"{key}={value}\n" for key, value in {**GOOD, "exit": "1", "bytes": "0"}.items())
    outcome = outcome_file_and_start_failures.parse_outcome(text)
    site = SlurmSite(container="pyxis", registry="registry.example/team/h20")
    assert outcome
    with pytest.raises(NetworkError, match="n cannot fetch x"):
        outcome_file_and_start_failures.require_started(outcome, site, "x", PYXIS)
    with pytest.raises(EngineError, match="cannot start"):
        outcome_file_and_start_failures.require_started(
            outcome, site, "x", "slurmstepd: error: pyxis: container start failed"
        )


def test_each_of_several_nodes_must_have_started() -> None:
    def left(parts: str) -> JobOutcome:
        values = {**GOOD, "node": "a,b", "parts": parts, "fabric": "no yes"}
        found = outcome_file_and_start_failures.parse_outcome(
            "".join(f"{key}={value}\n" for key, value in values.items())
        )
        assert found
        return found

    assert (left("0:5 5:7").parts, left("0:5 5:7").fabric) == (((0, 5), (5, 7)), (False, True))
    outcome_file_and_start_failures.require_started(left("0:5 5:7"), SlurmSite(), "x", "")
    for parts in ("0:5 125:0", "1:0 0:5"):
        with pytest.raises(EngineError, match="cannot start"):
            outcome_file_and_start_failures.require_started(left(parts), SlurmSite(), "x", "")


TOGETHER = dataclasses.replace(JOB, nodes=2)


def test_two_nodes_leave_what_each_of_them_said(stub: Stub) -> None:
    """Each node has its number, the address of the first node, and its own frames; only their containers have a
    network."""
    output = stub.run(TOGETHER, SlurmSite(interface="ib0"))
    frames = b"".join(lines(documents()))
    assert (output.stdout, output.parts) == (frames * 2, ((0, len(frames)),) * 2)
    assert output_judge.judge_nodes(output, NONCE, ()).errors == ()
    assert located(output).node == "node-7,node-8" and located(output).infiniband == (False, False)
    assert located(output).unconfined == ("dist.nodes: the nodes' network, by ib0",)
    ran = stub.recorded("ran")
    assert "--network host" in ran and "--cap-drop ALL" in ran and "ENVBUILD_INTERFACE=ib0" in ran
    assert re.search(r"ENVBUILD_NODE=[01] --env ENVBUILD_MEETING=192\.0\.2\.7:2[0-9]{4} ", ran)
    assert stub.left() == []
    stub.run()
    assert "--network none" in stub.recorded("ran") and "ENVBUILD" not in stub.recorded("ran")


def test_obstacles_for_two_nodes_are_reported(stub: Stub) -> None:
    with pytest.raises(UsageError, match="no interface is set"):
        stub.run(TOGETHER)
    with pytest.raises(UsageError, match="not possible with pyxis"):
        stub.run(TOGETHER, SlurmSite(container="pyxis", registry="r", interface="ib0"), reference=f"r@{IMAGE.id}")
    with pytest.raises(RunnerError, match="node-7 has no IPv4 address on eth9"):
        stub.run(TOGETHER, SlurmSite(interface="eth9"))
    stub.say(no_image="")
    with pytest.raises(EngineError, match="has no image"):
        stub.run(TOGETHER, SlurmSite(interface="ib0"))
    (stub.folder / "no-image").unlink()
    stub.frames(b"")
    stub.say(code="125", words="docker: no space left on device")
    with pytest.raises(EngineError, match="cannot start the image"):
        stub.run(TOGETHER, SlurmSite(interface="ib0"))
    assert stub.left() == []


def test_a_job_on_two_nodes_ends_if_its_envbuild_is_gone(stub: Stub) -> None:
    """The job cannot be resumed: its result would be combined with that of the first run, which is lost with the
    process."""

    def gone(text: str) -> None:
        if "is submitted" in text:
            raise HungUp

    stub.say(hold="")
    site = SlurmSite(folder=str(stub.shared), grace=1, interface="ib0")
    with pytest.raises(HungUp):
        Slurm(site, IMAGE, None, "sample").run(TOGETHER, Watch(say=gone))
    assert stub.recorded("cancelled").startswith("--name=envbuild-sample-") and stub.left() == []
    stub.say(down="")
    with pytest.raises(RunnerError) as caught:
        stub.run(TOGETHER, site)
    assert caught.value.ending == "unknown" and "--resume" not in str(caught.value.hint) and stub.left() == []


def test_a_damaged_ticket_is_ignored(stub: Stub) -> None:
    (user_folders.state_folder("slurm") / "9.ticket.json").write_text(json.dumps({"job": "9"}), encoding="utf-8")
    for job in ("9", "../9", "x"):
        with pytest.raises(UsageError):
            stub.run(resume=job)


def test_a_job_that_is_not_a_self_test_ends_with_the_terminal(stub: Stub) -> None:
    """Its result is of no use to a later process."""
    stub.hang()
    audit = dataclasses.replace(JOB, is_selftest=False)

    def line(_: bytes) -> None:
        raise HungUp

    with pytest.raises(HungUp):
        Slurm(SlurmSite(folder=str(stub.shared)), IMAGE, None, "sample").run(audit, Watch(line, stub.notes.append))
    assert stub.recorded("cancelled").startswith("--name=envbuild-sample-") and stub.left() == []
    assert stub.notes[0] == "job 42 is submitted"
