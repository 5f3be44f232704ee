"""`why`: the reasons that a profile states, and which of them a profile that extends it inherits."""

from __future__ import annotations

from pathlib import Path

import pytest

from envbuild.profile import inherited_value_reasons
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.util.errors import ProfileError
from unit.support import PROFILE, as_yaml, envbuild, lock_for, plan_of, write_profile

PARENT = {
    **PROFILE,
    "torch": "2.7.1",
    "gpus": ["h20"],
    "cuda": "12.6",
    "packages": ["numpy", "einops>=0.8"],
    "env": {"A_SWITCH": "1"},
    "why": {
        "torch": "for CUDA 12",
        "cublas": "newer than the fault",
        "numpy": "for arrays",
        "einops": "for shapes",
        "A_SWITCH": "faster",
        "driver": "the fleet has it",
    },
    "driver": {"minimum": "550.54.15"},
}


def inherited(project: Path, child: dict[str, object], pins: dict[str, str] | None = None) -> dict[str, str]:
    write_profile(project, PARENT, "parent")
    (project / "profiles" / "child.yaml").write_text(as_yaml({"extends": "parent", **child}), encoding="utf-8")
    return dict(profile_reader_and_overrides.load("child", pins).profile.why)


def test_reasons_are_inherited(project: Path) -> None:
    assert inherited(project, {"description": "the same"}) == PARENT["why"]


def test_a_changed_value_drops_the_reason_of_the_parent(project: Path) -> None:
    found = inherited(project, {"torch": "2.14.0", "cuda": "13.0", "packages": ["numpy"], "env": {"A_SWITCH": "0"}})
    assert found == {"numpy": "for arrays", "driver": "the fleet has it"}


def test_the_reason_for_torch_is_dropped_for_other_gpus(project: Path) -> None:
    assert "torch" in inherited(project, {"gpus": PARENT["gpus"]})
    assert "torch" not in inherited(project, {"gpus": ["a30"]})


def test_a_child_states_its_own_reason(project: Path) -> None:
    found = inherited(project, {"torch": "2.14.0", "cuda": "13.0", "why": {"torch": "for CUDA 13"}})
    assert found["torch"] == "for CUDA 13"
    assert "cublas" not in found


def test_a_pin_of_a_library_drops_its_inherited_reason(project: Path) -> None:
    found = inherited(project, {"pins": {"cublas": {"version": "12.6.4.1", "reason": "own"}}})
    assert "cublas" not in found and "torch" in found


@pytest.mark.parametrize(("pin", "dropped"), [("numpy", {"numpy"}), ("torch", {"torch", "cublas"})])
def test_a_pin_of_the_command_line_drops_the_reason(project: Path, pin: str, dropped: set[str]) -> None:
    found = inherited(project, {}, {pin: "2.7.0" if pin == "torch" else "2.0.0"})
    assert found.keys() == PARENT["why"].keys() - dropped


def test_a_reason_needs_a_value(project: Path) -> None:
    with pytest.raises(ProfileError) as caught:
        plan_of(project, {**PARENT, "why": {"scipy": "for what?", "cudnn": "of torch"}})
    assert [fault.message for fault in caught.value.faults] == [
        "the profile sets no key, library, package or variable scipy to explain"
    ]
    assert [fault.field for fault in caught.value.faults] == ["why.scipy"]


def test_a_pin_with_two_reasons_is_refused(project: Path) -> None:
    pins = {"cublas": {"version": "12.6.4.1", "reason": "one"}}
    with pytest.raises(ProfileError) as caught:
        plan_of(project, {**PARENT, "pins": pins})
    assert "pins.cublas has a reason already: keep one of the two" in [fault.message for fault in caught.value.faults]


@pytest.mark.parametrize("why", [{"torch": ""}, {"a b": "x"}, {"torch": "two\nlines"}, ["torch"], {"torch": 1}])
def test_malformed_reasons_are_refused_with_their_key(project: Path, why: object) -> None:
    write_profile(project, {**PARENT, "why": why})
    with pytest.raises(ProfileError) as caught:
        profile_reader_and_overrides.load("sample")
    assert caught.value.faults and all((fault.field or "").startswith("why") for fault in caught.value.faults)


def test_a_malformed_list_of_packages_is_not_blamed_on_its_reasons(project: Path) -> None:
    write_profile(project, {**PARENT, "packages": "numpy"})
    with pytest.raises(ProfileError) as caught:
        profile_reader_and_overrides.load("sample")
    assert [fault.field for fault in caught.value.faults] == ["packages"]


def test_a_reason_is_no_part_of_the_lock(project: Path) -> None:
    with_reasons = lock_for(plan_of(project, PARENT))
    without = lock_for(plan_of(project, {key: value for key, value in PARENT.items() if key != "why"}))
    assert with_reasons.id == without.id


def test_show_prints_each_reason_with_its_value(project: Path) -> None:
    write_profile(project, PARENT)
    done = envbuild("show", "sample")
    assert "  for h20; driver 550.54.15 or newer: the fleet has it\n" in done.stdout
    assert "; for CUDA 12\n" in done.stdout
    assert "required by torch 2.7.1; newer than the fault\n" in done.stdout
    assert "; for arrays\n" in done.stdout  # a package that is not locked
    assert "  A_SWITCH=1: faster\n" in done.stdout
    assert "  torch: " not in done.stdout and "  driver: " not in done.stdout
    document = envbuild("show", "sample", "--json").document
    assert document["why"] == PARENT["why"]
    assert document["reasons"]["torch"].endswith("; for CUDA 12")
    assert document["environment"] == [{"variable": "A_SWITCH", "value": "1", "reason": "faster"}]


def test_show_prints_the_reason_of_a_pin_that_overrides_nothing(project: Path) -> None:
    pins = {"cublas": {"version": "12.6.4.1", "reason": "as tested"}}
    write_profile(project, {**PARENT, "pins": pins, "why": {"base": "what we use"}})
    shown = envbuild("show", "sample").stdout
    assert "; as tested\n" in shown
    assert "  base: what we use\n" in shown


def test_an_override_takes_its_reason_from_why(project: Path) -> None:
    profile = {**PARENT, "pins": {"cublas": "12.6.3.3"}, "why": {"cublas": "as tested"}}
    plan = plan_of(project, profile)
    assert plan.reasons["cublas"].endswith("overriding torch's ==12.6.4.1: as tested")
    assert plan_resolver.as_locked(plan, {}).overrides[0].reason == "as tested"


def test_values_of_malformed_documents_are_ignored() -> None:
    data = {"packages": [{"name": "numpy"}, 3, " numpy>1"], "pins": ["cublas"], "env": "A", "apt": None}
    assert inherited_value_reasons.named_values(data, "numpy") == [{"name": "numpy"}, " numpy>1"]
    assert inherited_value_reasons.named_values(data, "cublas") == inherited_value_reasons.named_values(data, "A") == []
