"""env.identity over cards that are not there: a fleet may be mixed as the profile lists it."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.context import Context
from envbuild.selftest.job import Job
from envbuild.selftest.probes import identity

A100, H20 = "NVIDIA A100-SXM4-80GB", "NVIDIA H20"


@pytest.mark.parametrize(
    ("visible", "expected", "reasons"),
    [
        ((A100, H20), (A100, H20), []),
        ((A100, A100), (A100, H20), []),
        ((A100, H20), (A100,), [f"this is {H20}, the profile is for {A100}"]),
        ((A100, H20), (), [f"the GPUs are not all the same: {A100}, {H20}"]),
    ],
)
def test_the_cards_are_those_that_the_profile_lists(
    monkeypatch: pytest.MonkeyPatch, visible: tuple[str, ...], expected: tuple[str, ...], reasons: list[str]
) -> None:
    def card(index: int) -> SimpleNamespace:
        return SimpleNamespace(name=visible[index], major=8, minor=0, multi_processor_count=1, total_memory=1)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(torch.cuda, "get_device_properties", card)
    context = Context(Job("0" * 32, device="cuda", gpus=expected))
    identity.identity(context)
    assert [fault.reason for fault in context.faults] == reasons
