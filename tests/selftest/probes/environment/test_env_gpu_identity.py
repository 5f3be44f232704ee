"""env.identity with simulated GPUs: their names must be among those of the profile, and their properties must match the
facts."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.environment import env_gpu_identity

H20_FACTS = {"compute_capability": "9.0", "sms": 78}
A100, H20 = "NVIDIA A100-SXM4-80GB", "NVIDIA H20"


Card = tuple[str, tuple[int, int], int]  # name, compute capability, SMs


def judged(monkeypatch: pytest.MonkeyPatch, visible: tuple[Card, ...], **job: Any) -> Context:
    def card(index: int) -> SimpleNamespace:
        name, (major, minor), sms = visible[index]
        return SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=sms, total_memory=1)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(torch.cuda, "get_device_properties", card)
    context = Context(JobDocument("0" * 32, device="cuda", **job))
    env_gpu_identity.env_identity(context)
    return context


def reasons(context: Context) -> list[str]:
    return [fault.reason for fault in context.faults]


@pytest.mark.parametrize(
    ("visible", "expected", "refusals"),
    [
        ((A100, H20), (A100, H20), []),
        ((A100, A100), (A100, H20), []),
        ((A100, H20), (A100,), [f"this is {H20}, the profile is for {A100}"]),
        ((A100, H20), (), [f"the GPUs are not all the same: {A100}, {H20}"]),
    ],
)
def test_the_gpus_are_those_that_the_profile_lists(
    monkeypatch: pytest.MonkeyPatch, visible: tuple[str, ...], expected: tuple[str, ...], refusals: list[str]
) -> None:
    found = judged(monkeypatch, tuple((name, (8, 0), 1) for name in visible), gpus=expected)
    assert reasons(found) == refusals


@pytest.mark.parametrize(
    ("capability", "sms", "known", "refusals"),
    [
        ((9, 0), 78, H20_FACTS, []),
        ((8, 9), 78, H20_FACTS, [f"this {H20} has the compute capability 8.9, the facts have 9.0"]),
        ((9, 0), 132, H20_FACTS, [f"this {H20} has the number of SMs 132, the facts have 78"]),
        ((9, 0), 132, {"compute_capability": "9.0"}, []),  # without a known value nothing is compared
        ((8, 9), 132, {}, []),
    ],
)
def test_a_gpu_of_the_right_name_is_held_to_what_the_facts_have(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    sms: int,
    known: Mapping[str, Any],
    refusals: list[str],
) -> None:
    found = judged(monkeypatch, ((H20, capability, sms),) * 2, gpus=(H20,), cards={H20: known})
    assert reasons(found) == refusals


def test_a_mig_slice_is_named_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    slice_ = (f"{H20} MIG 1g.12gb", (9, 0), 8)
    found = judged(monkeypatch, (slice_,), gpus=(H20,), cards={H20: H20_FACTS})
    assert reasons(found) == [f"this is a MIG slice (1g.12gb) of {H20}, the profile is for whole GPUs"]
    assert found.traits["gpus"][0]["mig"] == "1g.12gb"
    unasked = judged(monkeypatch, (slice_,))
    assert (reasons(unasked), unasked.traits["gpus"][0]["mig"]) == ([], "1g.12gb")
