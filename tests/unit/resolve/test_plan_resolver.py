from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envbuild.facts import database
from envbuild.report import pin_reasons
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.resolve.torch_compatibility_and_advisories import Choice, choose_stack
from envbuild.util import package_data
from envbuild.util.errors import ProfileError
from unit.facts.test_database import site
from unit.support import PROFILE, envbuild, plan_of, profile_of, write_profile

IMAGE = f"registry.example/library/debian:12@sha256:{'a' * 64}"


def test_a_bootstrap_profile_becomes_a_plan(project: Path) -> None:
    plan = plan_of(project, PROFILE)
    assert (plan.name, plan.platform, plan.suite, plan.image) == ("sample", "linux/amd64", "bookworm", None)
    assert (plan.python, plan.glibc) == ("3.11", "2.36")
    assert plan.core == ("pip", "torch==2.13.0+cpu")
    assert plan.packages == ("numpy",)
    assert plan.base_packages == database.base_packages()


def test_an_image_profile_becomes_a_plan(project: Path) -> None:
    plan = plan_of(project, {**PROFILE, "base": {"image": IMAGE}, "apt": [], "python": "3.12"})
    assert (plan.suite, plan.image, plan.glibc, plan.base_packages) == (None, IMAGE, "2.28", ())


@pytest.mark.parametrize(("suite", "python"), [("bullseye", "3.9"), ("bookworm", "3.11"), ("trixie", "3.13")])
def test_each_suite_goes_with_its_python(project: Path, suite: str, python: str) -> None:
    assert plan_of(project, {**PROFILE, "base": {"bootstrap": suite}, "python": python}).suite == suite


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (
            {"python": "3.12"},
            "python",
            "bookworm has Python 3.11, not 3.12 (bullseye 3.9, bookworm 3.11, trixie 3.13)",
        ),
        ({"base": {"bootstrap": "trixie"}}, "python", "trixie has Python 3.13"),
        ({"base": {"image": IMAGE}}, "apt", "need a bootstrap base"),
    ],
)
def test_contradictions_name_their_place(project: Path, change: dict[str, Any], field: str, words: str) -> None:
    loaded = profile_of(project, {**PROFILE, **change})
    with pytest.raises(ProfileError, match="refused") as caught:
        plan_resolver.resolve(loaded)
    (fault,) = caught.value.faults
    assert (fault.file, fault.field) == ("profiles/sample.yaml", field)
    assert fault.line == loaded.document.place((field,)).line > 1
    assert words in fault.message


@pytest.mark.parametrize(
    ("profile", "pin", "hint"),
    [
        ("h20-cu12", "cublas=12.3.4.1", "--pin cublas=12.6.4.1"),  # no older than torch's own
        ("step-video", "cublas=12.1.3.1", "--pin cublas=12.5.2.13"),  # nor than the profile's pin
        ("v100", "cudnn=9.12.0.46", "--pin cudnn=9.10.2.21"),
        ("v100", "torch=2.13.0", "--pin torch=2.10.0 --pin cuda=12.8 --pin cudnn=9.10.2.21"),
    ],
)
def test_a_pin_that_is_refused_comes_with_one_that_is_not(project: Path, profile: str, pin: str, hint: str) -> None:
    refused = envbuild("show", profile, "--pin", pin)
    assert refused.code == 3 and f"hint: {hint}" in refused.stderr
    given = [word for part in hint.split() if "=" in part for word in ("--pin", part)]
    assert envbuild("show", profile, *given).code == 0, "what the hint says is taken"


def test_a_version_that_is_refused_comes_with_a_line_for_the_profile(project: Path) -> None:
    loaded = profile_of(project, {**PROFILE, "gpus": ["h20"], "torch": "2.3.1"})
    with pytest.raises(ProfileError) as caught:
        plan_resolver.resolve(loaded)
    assert caught.value.hint == "in the profile: pins: {cublas: 12.4.5.8}"


def test_a_pin_of_the_profile_that_is_refused_gives_way_to_what_torch_brings(project: Path) -> None:
    loaded = profile_of(project, {**PROFILE, "gpus": ["h20"], "torch": "2.7.1", "pins": {"cublas": "12.1.3.1"}})
    with pytest.raises(ProfileError) as caught:
        plan_resolver.resolve(loaded)
    assert caught.value.hint == "in the profile: pins: {cublas: 12.6.4.1}"


def test_a_profiles_own_environment_wins(project: Path) -> None:
    plan = plan_of(project, {**PROFILE, "env": {"HOME": "/home/me", "A": "1"}})
    assert plan.environment["HOME"] == "/home/me"
    assert plan.environment["A"] == "1"
    assert plan.environment["PATH"].startswith("/opt/venv/bin:")
    assert list(plan.environment) == sorted(plan.environment)


def test_debian_packages_are_a_set(project: Path) -> None:
    assert plan_of(project, {**PROFILE, "apt": ["zip", "less", "zip"]}).apt == ("less", "zip")


def test_every_pin_has_its_reason(project: Path) -> None:
    plan = plan_of(project, PROFILE)
    assert plan.reasons["torch"].startswith("profiles/sample.yaml:")
    assert "Debian bookworm's own" in plan.reasons["python"]
    assert plan.reasons["numpy"].startswith("profiles/sample.yaml:")
    assert "child images" in plan.reasons["pip"]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"description": "other"}, set()),
        ({"selftest": {"level": "full"}}, set()),
        ({"env": {"GREETING": "bye"}}, {"environment"}),
        ({"torch": "2.14.0"}, {"wheels"}),
        ({"packages": ["numpy", "scipy"]}, {"wheels"}),
        ({"apt": ["less", "zip"]}, {"apt"}),
        ({"base": {"bootstrap": "trixie"}, "python": "3.13"}, {"base", "wheels"}),
        ({"base": {"image": IMAGE}, "apt": []}, {"base", "wheels", "apt", "environment"}),
    ],
)
def test_a_profile_key_belongs_to_one_part_of_the_lock(project: Path, change: dict[str, Any], parts: set[str]) -> None:
    before = plan_of(project, PROFILE).inputs
    after = plan_of(project, {**PROFILE, **change}).inputs
    assert {part for part in before if before[part] != after[part]} == parts


@pytest.mark.parametrize("name", ["g++", "libstdc++-14-dev", "libsigc++-2.0-0v5"])
def test_a_debian_package_may_have_a_plus_in_its_name(project: Path, name: str) -> None:
    assert plan_of(project, {**PROFILE, "apt": [name]}).apt == (name,)


def test_the_line_of_a_request_is_found_from_the_message_of_the_resolver(project: Path) -> None:
    plan = plan_of(project, {**PROFILE, "packages": ["numpy", "scipy>=1"], "apt": ["less"]})
    (fault,) = plan.faults("Because there is no version of scipy and you require it")
    assert (fault.file, fault.message) == ("profiles/sample.yaml", "scipy>=1")
    assert [found.message for found in plan.faults("E: Unable to locate package less")] == ["less"]
    assert plan.faults("nothing of that") == []


# facts that are known only after locking

HOPPER: dict[str, Any] = {**PROFILE, "gpus": ["h20"], "torch": "2.2.1", "packages": ["numpy", "extra"]}
SITE = """
as_of: 2026-11
sources: {site: "our own"}
advisories:
  - {id: own-fault, title: "extra 3 eats data", severity: refuse, match: {distributions: {extra: ">=3"}},
     decidable: true, shows: {}, remedy: "extra older than 3", cite: [site], source: [site], status: verified}
"""


def states(choice: Choice) -> dict[str, str]:
    return {row.id: row.state for row in choice.advisories}


def test_a_locked_version_that_no_profile_named_is_refused(project: Path) -> None:
    """The facts have no row for torch 2.2.1, so the cuBLAS that torch 2.2.1 requires is known only after torch 2.2.1 is
    locked."""
    plan = plan_of(project, HOPPER)
    assert "cublas-hopper-fpe" not in states(plan.choice)
    with pytest.raises(ProfileError, match="sample is refused") as caught:
        plan_resolver.as_locked(plan, {"torch": "2.2.1", "nvidia-cublas-cu12": "12.1.3.1"})
    (fault,) = caught.value.faults
    assert fault.message.startswith("locked cublas 12.1.3.1: cublas-hopper-fpe: ")
    assert "12.4.5.8 or newer" in fault.message and "pytorch/pytorch#133548" in fault.message
    assert (fault.file, fault.line) == ("profiles/sample.yaml", plan.places["torch===2.2.1"].line)
    assert "accept" in str(caught.value.hint)
    advisories = {row["id"]: row["state"] for row in caught.value.partial["advisories"]}
    assert advisories["cublas-hopper-fpe"] == "refused"


def test_a_locked_version_past_the_fault_is_let_through(project: Path) -> None:
    plan = plan_of(project, HOPPER)
    choice = plan_resolver.as_locked(plan, {"torch": "2.2.1", "nvidia-cublas-cu12": "12.4.5.8"})
    assert "refused" not in states(choice).values()
    assert choice.situation.libraries["cublas"] == "12.4.5.8"


def test_a_refusal_that_is_taken_on_is_let_through_and_stays_visible(project: Path) -> None:
    plan = plan_of(project, {**HOPPER, "accept": [{"advisory": "cublas-hopper-fpe", "reason": "no products"}]})
    choice = plan_resolver.as_locked(plan, {"nvidia-cublas-cu12": "12.1.3.1"})
    assert states(choice)["cublas-hopper-fpe"] == "accepted"


def test_a_library_that_comes_along_counts_for_several_gpus_alone(project: Path) -> None:
    locked = {"nvidia-nccl-cu12": "2.18.1"}
    plan_resolver.as_locked(plan_of(project, HOPPER), locked)
    with pytest.raises(ProfileError) as caught:
        plan_resolver.as_locked(plan_of(project, {**HOPPER, "gpu_count": 4}), locked)
    assert caught.value.faults[0].message.startswith("locked nccl 2.18.1: nccl-2.18.1: ")


def test_a_refused_package_is_named_at_its_own_line(project: Path) -> None:
    site(SITE)
    plan = plan_of(project, HOPPER)
    with pytest.raises(ProfileError) as caught:
        plan_resolver.as_locked(plan, {"extra": "3.1"})
    (fault,) = caught.value.faults
    assert fault.line == plan.places["extra"].line
    assert fault.message == "locked extra 3.1: own-fault: extra 3 eats data. extra older than 3 (site)"


def test_a_warning_about_a_locked_version_is_reported(project: Path) -> None:
    plan = plan_of(project, {**HOPPER, "torch": "2.2.2", "gpus": ["a100"]})
    assert "numpy2-old-torch" not in states(plan.choice)
    assert states(plan_resolver.as_locked(plan, {"numpy": "2.4.6"}))["numpy2-old-torch"] == "warned"
    assert "numpy2-old-torch" not in states(plan_resolver.as_locked(plan, {"numpy": "1.26.4"}))


def test_a_library_for_two_cudas_counts_with_the_cuda_of_torch(project: Path) -> None:
    plan = plan_of(project, {**HOPPER, "torch": "2.7.1"})
    choice = plan_resolver.as_locked(plan, {"nvidia-cublas": "13.0.0.19", "nvidia-cublas-cu12": "12.6.4.1"})
    assert choice.situation.libraries["cublas"] == "12.6.4.1"


@pytest.mark.parametrize(
    ("name", "version", "other"),
    [
        ("cublas", "13.1.0.3", "13"), ("cublas", "11.11.3.6", "11"), ("cublas", "12.99.1.1", None),
        ("cublas", "14.0.0.1", None), ("cudart", "13.0.48", "13"), ("cudnn", "9.99.0.1", None),
    ],
)  # fmt: skip
def test_a_pin_for_another_cuda_than_torchs_is_refused(
    project: Path, name: str, version: str, other: str | None
) -> None:
    """The facts know the wheels of each CUDA version. Whether an unknown version exists is decided by the index."""
    profile = {**HOPPER, "torch": "2.7.1", "pins": {name: version}}
    messages = [fault.message for fault in choose_stack(profile_of(project, profile)).faults]
    assert [text for text in messages if "is for CUDA" in text] == (
        [f"{name} {version} is for CUDA {other}; torch 2.7.1 is built for CUDA 12.6 and uses "
         f"{database.distribution_of(name, '12.6')}"] if other else []
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"pins": {"torch": "2.5.0"}}, "pins.torch: a pin does not change torch: write torch: 2.5.0"),
        ({"packages": ["a", "torch==2.5.0"]}, "packages[1]: the profile has torch 2.7.1: change its key torch instead"),
        ({"packages": ["a", "torch>=2.6"]}, None),
    ],
)
def test_another_torch_in_pins_or_packages_is_refused(project: Path, change: dict[str, Any], fault: str | None) -> None:
    found = choose_stack(profile_of(project, {**HOPPER, "torch": "2.7.1", **change})).faults
    assert [f"{one.field}: {one.message}" for one in found] == ([fault] if fault else [])


def test_a_pin_that_no_index_has_is_named_at_its_line(project: Path) -> None:
    plan = plan_of(project, {**HOPPER, "torch": "2.7.1", "pins": {"cublas": "12.6.4.9"}})
    message = "there is no version of nvidia-cublas-cu12==12.6.4.9"
    (fault,) = plan.faults(message)
    assert (fault.file, fault.line) == ("profiles/sample.yaml", plan.places["nvidia-cublas-cu12==12.6.4.9"].line)
    assert fault.line != plan.places["torch===2.7.1"].line


@pytest.mark.parametrize(("transformers", "state"), [("4.57.6", "warned"), ("5.7.0", "warned"), ("5.8.0", None)])
def test_apex_with_a_transformers_that_uses_its_norm_in_t5(transformers: str, state: str | None, project: Path) -> None:
    """The warning is given whichever transformers the resolver chose. Only the user knows whether a T5 runs in fp16, so
    this is a warning with three workarounds."""
    apex = {"name": "apex", "git": "https://github.com/NVIDIA/apex", "commit": "c" * 40, "modules": ["amp_C"]}
    data = {**PROFILE, "packages": ["transformers>=4"], "torch": "2.11.0", "gpus": ["a100"]}
    plan = plan_of(project, {**data, "extensions": [{"name": "apex", "none": "not here"}]})
    with_apex = plan_of(project, {**data, "extensions": [apex]})
    choice = plan_resolver.as_locked(with_apex, {"transformers": transformers})
    assert states(choice).get("apex-t5-mixed-dtype") == state
    assert "apex-t5-mixed-dtype" not in states(plan_resolver.as_locked(plan, {"transformers": transformers}))
    for item in choice.advisories:
        if item.id == "apex-t5-mixed-dtype":
            for words in ("T5 model runs in fp16", "transformers 5.8 or newer", "uninstall apex", "in bf16 or fp32"):
                assert words in item.remedy


SHIPPED = sorted(file for file in package_data.PROFILES.rglob("*.yaml") if not file.name.endswith(".lock.yaml"))


@pytest.mark.parametrize("file", [file for file in SHIPPED if file.stem != "cpu"], ids=lambda file: file.stem)
def test_every_gpu_profile_states_its_apex(file: Path) -> None:
    """The profile compiles apex for its GPUs and requires apex's probes to pass, or says why it has no apex."""
    profile = profile_reader_and_overrides.load(str(file)).profile
    (apex,) = [one for one in profile.extensions if one.name == "apex"]
    assert (apex.none is None) == (profile.cuda == "13.0")  # nvcc of CUDA 13 is on the index
    assert apex.none or {"norm.apex", "optim.apex"} <= set(profile.selftest.require)


def test_torchs_own_index_has_the_same_build_with_the_label_of_its_cuda(project: Path) -> None:
    """A torch with its label is judged like the same torch without one."""
    plain = choose_stack(profile_of(project, {**HOPPER, "torch": "2.3.1"}))
    labelled = choose_stack(profile_of(project, {**HOPPER, "torch": "2.3.1+cu121"}))
    assert labelled.situation.libraries == plain.situation.libraries
    refused = [{item.advisory.id for item in one.advice if item.state == "refused"} for one in (plain, labelled)]
    assert refused[0] == refused[1] and "cublas-hopper-fpe" in refused[0]


@pytest.mark.parametrize(
    ("torch", "cuda", "fault"),
    [
        ("2.7.1+cu128", "12.6", 'cuda: torch 2.7.1+cu128 is built for CUDA 12.8, not 12.6: write cuda: "12.8"'),
        ("2.7.1+cu128", "12.8", None),
        ("2.99.0", "12.6", "torch: the CUDA version of torch 2.99.0 is not known"),
    ],
)
def test_a_label_of_torch_states_its_cuda(project: Path, torch: str, cuda: str, fault: str | None) -> None:
    found = choose_stack(profile_of(project, {**HOPPER, "torch": torch, "cuda": cuda})).faults
    assert [f"{one.field}: {one.message}".startswith(fault) for one in found] == [True] if fault else not found


def test_libraries_of_an_unknown_build_of_torch_are_said_to_be_unknown(project: Path) -> None:
    write_profile(project, {**HOPPER, "torch": "2.7.1+cu118"})
    reasons = envbuild("show", "sample", "--json").document["reasons"]
    assert {reasons[name] for name in pin_reasons.LIBRARIES} == {pin_reasons.UNKNOWN_LIBRARY}
    write_profile(project, {**HOPPER, "torch": "2.7.1"})
    assert pin_reasons.UNKNOWN_LIBRARY not in envbuild("show", "sample", "--json").document["reasons"].values()
