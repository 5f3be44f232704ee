"""The preflight of `make`: what the preflight reports before anything is fetched, and when it stops `make`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from envbuild.attest import keys_and_signatures
from envbuild.doctor import nvml_reader
from envbuild.doctor.machine_readings import DriverReading, GpuReading, Mig
from envbuild.evidence import profile_proofs_and_image_states
from envbuild.evidence.proof_rules import Proof
from envbuild.image.oci import base_image_download, disk_space_needs, lock_image_lookup_and_recipe
from envbuild.lock import lock_file
from envbuild.pipeline import make_build_and_test, preflight_report, step_durations
from envbuild.pipeline.model import Options
from envbuild.pipeline.preflight_report import ProofMachine, Provability
from envbuild.pipeline.progress_events import Note, Step
from envbuild.pipeline.step_context import StepContext
from envbuild.resolve import plan_resolver
from envbuild.runners import docker_runner
from envbuild.testrun.selftest_job import RunRequest
from envbuild.util import user_folders
from envbuild.util.errors import EngineError, EnvbuildError, NotProved, OutOfDate, UsageError
from envbuild.util.untrusted_input_errors import Reason
from unit.image.base_images import PLATFORM, PushedBase, debian
from unit.registries import Registry, serving
from unit.support import PROFILE, configure, envbuild, image_of, lock_for, profile_of, write_profile

GPU = {**PROFILE, "torch": "2.7.1", "gpus": ["h20"]}
H20, A100 = "NVIDIA H20", "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("gpus", "count", "machine", "refusal", "proof", "words"),
    [
        ((), 1, ProofMachine("local"), None, "possible", ""),
        ((), 1, ProofMachine("local", missing=Reason("engine", "no engine")), None, "impossible", "no engine"),
        (("h20",), 1, ProofMachine("local", (H20,)), None, "possible", ""),
        (("h20",), 2, ProofMachine("local", (H20, H20)), None, "possible", ""),
        (
            ("h20",),
            2,
            ProofMachine("local", (H20,)),
            None,
            "impossible",
            "uses 2 GPUs together",
        ),
        ((), 1, ProofMachine("slurm"), None, "elsewhere", "on slurm"),
        (("h20",), 2, ProofMachine("local", (H20, H20), selected=1), None, "impossible", "--gpus names 1: name more"),
        (("h20",), 1, ProofMachine("local"), None, "possible", ""),  # the engine has one, of an unknown model
        (("h20",), 1, ProofMachine("local", (A100, A100)), None, "impossible", f"has 2 x {A100}"),
        (("h20",), 1, ProofMachine("local", ("unheard of",)), None, "impossible", "has unheard of"),
        (("a800",), 1, ProofMachine("local", (A100,)), None, "possible", ""),  # they share evidence
        (
            ("a100", "h20"),
            1,
            ProofMachine("local", (A100,)),
            None,
            "possible",
            "only for a100; for h20, use another machine",
        ),
        (
            ("a100", "h20"),
            2,
            ProofMachine("local", (A100, A100, H20)),
            None,
            "possible",
            "only for a100; for h20, use another machine",
        ),
        (("h20",), 1, ProofMachine("local", missing=Reason("no-gpu", "no GPU")), None, "impossible", "no GPU"),
        (("h20",), 1, ProofMachine("local", (H20,)), "too old", "impossible", "too old"),
        (("h20",), 1, ProofMachine("local"), "too old", "impossible", "too old"),
        (
            ("h20",),
            1,
            ProofMachine("slurm", missing=Reason("no-gpu", "no GPU")),
            None,
            "elsewhere",
            "on slurm, on a node that has h20",
        ),
    ],
)
def test_whether_a_proof_is_possible(
    gpus: tuple[str, ...], count: int, machine: ProofMachine, refusal: str | None, proof: Provability, words: str
) -> None:
    found, reasons = preflight_report.judge_proof(gpus, count, machine, refusal, proved=False)
    assert found == proof and words in "; ".join(map(str, reasons)) and bool(words) == bool(reasons)
    assert preflight_report.judge_proof(gpus, count, machine, refusal, proved=True) == ("proved", ())


RUNS = [
    step_durations.StepDurations("h20", 1000, {"lock": 5, "build": 600, "self-test": 60}, "2026-11-02"),
    step_durations.StepDurations("tested", 1000, {"self-test": 60}, "2026-11-03"),
    step_durations.StepDurations("cpu", 100, {"build": 60, "self-test": 30}, "2026-11-01"),
]
BOTH = step_durations.BUILD_STEPS - {"extensions"} | step_durations.TEST_STEPS


@pytest.mark.parametrize(
    ("runs", "profile", "steps", "minutes", "source"),
    [
        (RUNS, "h20", BOTH, 11.1, "h20"),
        (RUNS, "h20", step_durations.TEST_STEPS, 1.0, "h20"),
        (RUNS, "h100", BOTH, 21.2, "h20"),  # the image has twice the size; the self-test takes as long
        (RUNS[2:], "h100", BOTH - step_durations.TEST_STEPS, 20.0, "cpu"),
    ],
)
def test_minutes_are_those_of_earlier_runs(
    runs: list[step_durations.StepDurations], profile: str, steps: frozenset[str], minutes: float, source: str
) -> None:
    size = 1000 if profile == "h20" else 2000
    assert step_durations.estimate(runs, profile, size, steps) == step_durations.Estimate(minutes, source)


def test_without_an_earlier_build_the_minutes_are_unknown() -> None:
    assert step_durations.estimate([], "h20", 1000, BOTH) is None
    assert step_durations.estimate(RUNS[1:2], "h20", 1000, BOTH) is None
    assert step_durations.estimate(RUNS[1:2], "tested", 1000, BOTH) is None
    assert step_durations.estimate(RUNS, "h20", 1000, BOTH | {"extensions"}) is None, "its compiler was never timed"


def test_a_step_that_was_never_measured_or_no_step_at_all_gives_no_minutes() -> None:
    built = step_durations.StepDurations("h20", 1000, {"build": 600}, "2026-11-02")
    assert step_durations.estimate([built], "h20", 1000, step_durations.TEST_STEPS) is None
    assert step_durations.estimate([built], "h20", 1000, frozenset()) is None
    assert step_durations.estimate([built], "h20", 1000, BOTH) is None


def test_what_a_killed_run_left_of_its_durations_is_removed_also_if_nothing_is_written() -> None:
    folder = user_folders.state_folder("durations")
    (folder / ".envbuild-tmp-killed").write_text("{", encoding="utf-8")
    step_durations.keep_durations("h20", 7, [Step("build", 0.1, True, "")])
    assert list(folder.iterdir()) == []


def test_durations_are_kept_by_step_and_a_damaged_file_is_ignored() -> None:
    step_durations.keep_durations("h20", 7, [Step("build", 61.0, False, ""), Step("lock", 9.0, True, "")])
    step_durations.keep_durations("h20", 8, [Step("self-test", 30.0, False, ""), Step("resolve", 1.0, False, "")])
    step_durations.keep_durations("h20", 9, [Step("build", 1.0, True, "")])
    (kept,) = step_durations.read_durations()
    assert (kept.profile, kept.size, kept.seconds) == ("h20", 8, {"build": 61.0, "self-test": 30.0})
    step_durations.keep_durations("cpu", 8, [Step("build", 1.0, False, "")])
    (file,) = user_folders.state_folder("durations").glob("h20.json")
    file.write_text("{", encoding="utf-8")
    assert [one.profile for one in step_durations.read_durations()] == ["cpu"]


# the preflight on a simulated machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, project: Path) -> SimpleNamespace:
    """A machine with one H20 and a local engine; no image is built. `gpu`: why the engine has no GPU."""
    found = SimpleNamespace(names=(H20,), driver="550.54.14", gpu=None, image=None, fault=None, mig=())

    def look(engine: object) -> None:
        if found.gpu:
            raise NotProved(found.gpu)

    def connect(context: StepContext) -> object:
        if found.fault:
            raise found.fault
        return SimpleNamespace()

    def read() -> DriverReading:
        cards = (
            SimpleNamespace(name=name, index=index, uuid=f"GPU-{index}", mig=Mig(index in found.mig, False, 0))
            for index, name in enumerate(found.names)
        )
        return DriverReading(found.driver, None, tuple(cast(GpuReading, card) for card in cards))

    monkeypatch.setattr(StepContext, "engine", property(connect))
    monkeypatch.setattr(nvml_reader, "read", read)
    monkeypatch.setattr(docker_runner, "look_for_gpu", look)
    monkeypatch.setattr(lock_image_lookup_and_recipe, "existing_image", lambda *_: found.image)
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/docker.sock")
    monkeypatch.delenv("CI", raising=False)
    write_profile(project, GPU)
    return found


def preview(**options: Any) -> preflight_report.Preflight:
    return make_build_and_test.preview_make("sample", Options(**options), MagicMock())


def test_the_preflight_of_a_profile_without_a_lock(machine: SimpleNamespace) -> None:
    found = preview()
    assert (found.proof, found.found_gpus, found.driver, found.needed_driver) == (
        "possible", (H20,), "550.54.14", "525.60.13",
    )  # fmt: skip
    assert (found.fetch_bytes, found.disk_bytes, found.expected_minutes) == (None, None, None)
    assert list(preflight_report.preflight_lines(found)) == [
        f"GPU: {H20}, driver 550.54.14; the profile is for h20",
        "line: sample, the default; driver 525.60.13 or newer",
        "to fetch and on disk: unknown, there is no lock yet",
        "time: unknown, no earlier run on this machine",
        "proof: possible here",
    ]


def test_bytes_and_minutes_are_those_of_the_lock(machine: SimpleNamespace, project: Path) -> None:
    loaded = profile_of(project, GPU)
    lock = lock_for(plan_resolver.resolve(loaded))
    lock_file.write(lock, loaded.lock_file, "sample")
    step_durations.keep_durations("sample", 1, [Step("build", 120.0, False, ""), Step("self-test", 60.0, False, "")])
    found = preview()
    assert found.fetch_bytes == disk_space_needs.fetched_bytes(lock) > 200_000_000
    assert found.disk_bytes == disk_space_needs.needed_bytes(lock)
    assert (found.expected_minutes, found.expected_from, found.lock_current) == (3.0, "sample", True)
    machine.image = image_of()
    found = preview()
    assert (found.fetch_bytes, found.disk_bytes, found.expected_minutes) == (0, 0, 1.0)
    assert preview(no_cache=True).disk_bytes == disk_space_needs.needed_bytes(lock)
    write_profile(project, {**GPU, "packages": ["einops"]})
    assert "an outdated lock" in "\n".join(preflight_report.preflight_lines(preview()))


def test_a_base_image_of_unknown_size_is_named(machine: SimpleNamespace, project: Path) -> None:
    with serving(Registry()) as registry:
        reference = PushedBase([debian()]).reference(registry)
        loaded = profile_of(project, {**GPU, "base": {"image": reference}, "apt": []})
        lock_file.write(lock_for(plan_resolver.resolve(loaded)), loaded.lock_file, "sample")
        text = ", without the base image, whose size is not known yet"
        assert text in "\n".join(preflight_report.preflight_lines(preview()))
        machine.image = image_of()
        assert not preview().without_base_image, "the image is built already"
        machine.image = None
        base_image_download.download_base_manifest(reference, PLATFORM)
        assert text not in "\n".join(preflight_report.preflight_lines(preview()))


def test_an_image_that_is_proved_needs_no_gpu(
    machine: SimpleNamespace, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = profile_of(project, GPU)
    lock_file.write(lock_for(plan_resolver.resolve(loaded)), loaded.lock_file, "sample")
    machine.image, machine.gpu = image_of(), "no GPU"
    proof = Proof("h20", "proved", cast(Any, object()), "")
    monkeypatch.setattr(profile_proofs_and_image_states, "proofs_of", lambda *_: (proof,))
    found = preview()
    assert found.proof == "proved"
    first, *_, time, _ = preflight_report.preflight_lines(found)
    assert (first, time) == ("GPU: not looked for; the profile is for h20", "time: nothing to do")


@pytest.mark.parametrize("locked", [True, False])
def test_the_driver_does_not_matter_with_a_fixed_lock_or_in_ci(
    machine: SimpleNamespace, project: Path, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    machine.driver = "470.57.02"
    assert preview().proof == "impossible"
    if not locked:
        monkeypatch.setenv("CI", "1")
    loaded = profile_of(project, GPU)
    lock_file.write(lock_for(plan_resolver.resolve(loaded)), loaded.lock_file, "sample")
    found = preview(locked=locked)
    assert (found.proof, found.driver) == ("possible", None)


def test_a_fixed_lock_must_exist_for_a_preview_too(machine: SimpleNamespace) -> None:
    with pytest.raises(OutOfDate, match=r"sample\.lock\.yaml is missing"):
        preview(locked=True)


def test_the_gpu_of_a_remote_engine_is_looked_for_there(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://builder.example:2376")
    machine.names, machine.driver = (A100,), "470.57.02"
    found = preview()
    assert (found.proof, found.found_gpus, found.driver) == ("possible", (), None)


def test_a_node_of_the_cluster_is_not_looked_at(machine: SimpleNamespace) -> None:
    configure("on: slurm\n")
    machine.gpu, machine.driver = "no GPU", "470.57.02"
    assert preview().proof == "elsewhere"


def test_without_an_engine_a_preview_says_so(machine: SimpleNamespace) -> None:
    machine.fault = EngineError("no Docker Engine answers")
    found = preview()
    assert (found.proof, found.reasons, found.found_gpus) == (
        "impossible", (Reason("engine", "no Docker Engine answers"),), (H20,),
    )  # fmt: skip


def make(agreed: bool = False, **options: Any) -> tuple[EnvbuildError, list[str], list[str]]:
    """Return the error of a `make` that ends where the lock would be made, its questions, and its notes."""
    questions: list[str] = []
    events = MagicMock()

    def agree(question: str) -> bool:
        questions.append(question)
        return agreed

    with pytest.raises(EnvbuildError) as caught:
        make_build_and_test.make("sample", Options(**options), events, agree)
    notes = [call.args[0].text for call in events.call_args_list if isinstance(call.args[0], Note)]
    return caught.value, questions, notes


@pytest.fixture
def no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise UsageError("the lock is made")

    monkeypatch.setattr(make_build_and_test, "lock_profile", stop)


@pytest.mark.usefixtures("no_lock")
@pytest.mark.parametrize("profile", [GPU, PROFILE])
@pytest.mark.parametrize("unproved", [False, True])
def test_without_an_engine_make_stops_before_anything_is_fetched(
    machine: SimpleNamespace, project: Path, profile: dict[str, Any], unproved: bool
) -> None:
    machine.fault = EngineError("no Docker Engine answers")
    write_profile(project, profile)
    error, _, notes = make(unproved=unproved)
    assert error is machine.fault and not notes


@pytest.mark.usefixtures("no_lock")
def test_without_the_gpu_make_stops_before_anything_is_fetched(machine: SimpleNamespace) -> None:
    machine.gpu = "the engine has no GPU to prove this on"
    error, questions, notes = make()
    assert isinstance(error, NotProved)
    assert error.message == "sample cannot be proved here: the engine has no GPU to prove this on"
    assert "--allow-unproved" in str(error.hint) and "envbuild build sample" in str(error.hint)
    assert [step["name"] for step in error.partial["steps"]] == ["load profile", "resolve"]
    assert error.partial["reasons"] == [{"id": "no-gpu", "detail": "the engine has no GPU to prove this on"}]
    assert len(questions) == 1 and "Build it without a proof?" in questions[0]
    assert notes[-1] == "proof: not possible here: the engine has no GPU to prove this on"


@pytest.mark.usefixtures("no_lock")
@pytest.mark.parametrize("agreed", [True, False])
def test_make_goes_on_if_that_is_allowed_or_agreed(machine: SimpleNamespace, agreed: bool) -> None:
    machine.gpu = "no GPU"
    error, questions, _ = make(agreed, unproved=not agreed)
    assert (error.message, len(questions)) == ("the lock is made", agreed)


@pytest.mark.usefixtures("no_lock")
def test_make_and_its_dry_run_report_too_few_selected_gpus(machine: SimpleNamespace, project: Path) -> None:
    write_profile(project, {**GPU, "gpu_count": 2})
    machine.names = (H20, H20)
    reason = "the profile uses 2 GPUs together, and --gpus names 1: name more"
    error, _, _ = make(request=RunRequest(gpus=("0",)))
    assert isinstance(error, NotProved) and error.message == f"sample cannot be proved here: {reason}"
    done = envbuild("make", "sample", "--dry-run", "--gpus", "0")
    assert f"  proof: not possible here: {reason}" in done.stdout.splitlines()
    assert preview(request=RunRequest(gpus=("0", "1"))).proof == "possible"


@pytest.mark.parametrize(
    ("selected", "id_", "words"),
    [
        ("0", None, ""),
        ("GPU-0", None, ""),
        ("1", "gpu", f"this machine has {A100}, and the profile is for h20"),
        ("7", "selected-gpus", "--gpus names 7, and this machine has the GPUs 0, 1, 2"),
        ("2", "mig", "MIG is on for GPU 2"),
    ],
)
def test_only_the_selected_gpus_count(machine: SimpleNamespace, selected: str, id_: str | None, words: str) -> None:
    machine.names, machine.mig = (H20, A100, H20), (2,)
    found = preview(request=RunRequest(gpus=(selected,)))
    assert (found.proof, [reason.id for reason in found.reasons]) == (
        ("impossible", [id_]) if id_ else ("possible", [])
    )
    assert words in found.reasons_text


def test_a_gpu_that_is_cut_into_mig_slices_is_not_whole(machine: SimpleNamespace) -> None:
    machine.mig = (0,)
    assert [reason.id for reason in preview().reasons] == ["mig"]
    machine.names = (H20, H20)
    assert (preview().proof, preview().found_gpus) == ("possible", (H20,))


@pytest.mark.usefixtures("no_lock")
def test_selected_gpus_are_refused_for_a_cluster_before_anything_is_fetched(machine: SimpleNamespace) -> None:
    configure("on: slurm\n")
    assert "a scheduler assigns its own" in make(request=RunRequest(gpus=("0",)))[0].message


@pytest.mark.usefixtures("no_lock")
@pytest.mark.parametrize("profile", [GPU, PROFILE])
def test_an_unusable_signing_key_is_reported_before_anything_is_fetched(
    machine: SimpleNamespace, project: Path, monkeypatch: pytest.MonkeyPatch, profile: dict[str, Any]
) -> None:
    write_profile(project, profile)
    monkeypatch.setenv(keys_and_signatures.KEY, "missing.key")
    assert "the signing key that ENVBUILD_SIGNING_KEY names cannot be read" in make()[0].message
    machine.gpu = "no GPU"
    assert profile is PROFILE or make(unproved=True)[0].message == "the lock is made", "no self-test, no evidence"


@pytest.mark.usefixtures("no_lock")
def test_the_line_that_supports_the_driver_is_named(machine: SimpleNamespace, project: Path) -> None:
    write_profile(project, {"extends": "h200", "gpus": ["h20"]})
    write_profile(project, GPU, "sample-cu12")
    error, _, _ = make()
    assert error.message == "sample cannot be proved here: sample needs driver 580.65.06 or newer, not 550.54.14"
    assert str(error.hint).startswith("sample-cu12 supports it: envbuild make sample-cu12, or --line auto")
    machine.driver = "470.57.02"
    assert "sample-cu12 needs driver 525.60.13 or newer" in str(make()[0].hint)


def test_a_dry_run_prints_the_preflight_and_does_nothing(machine: SimpleNamespace, project: Path) -> None:
    machine.gpu = "no GPU"
    before = sorted(project.rglob("*"))
    done = envbuild("make", "sample", "--dry-run")
    lines = done.stdout.splitlines()
    assert (done.code, lines[0], lines[-2]) == (0, "sample:", "  proof: not possible here: no GPU")
    assert lines[-1].startswith("  make would stop here, with exit code 4; with --allow-unproved it builds")
    allowed = envbuild("make", "sample", "--dry-run", "--allow-unproved")
    assert allowed.stdout.splitlines() == lines[:-1]
    assert envbuild("make", "sample", "--dry-run", "--json").document["proof"] == "impossible"
    both = envbuild("make", "sample", "NVIDIA L20", "--dry-run", "--json").document["profiles"]
    assert [row["profile"] for row in both] == ["sample", "l20"]
    assert sorted(project.rglob("*")) == before
