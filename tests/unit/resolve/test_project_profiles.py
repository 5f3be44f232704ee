"""The shipped profiles of projects have the versions that the projects' own files name, or say in `partial` why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from envbuild.resolve import plan_resolver, profile_reader_and_overrides

# project profile -> the torch that it has, and packages of the project's file
NAMED = {
    "amphion": (
        "2.0.1",
        "torchaudio==2.0.2 torchvision==0.15.2 librosa==0.9.1 accelerate==0.24.1 transformers==4.41.2",
    ),
    "onediff-svd": ("2.1.0", "transformers diffusers accelerate"),
    "open-sora": ("2.4.0", "torchvision==0.19.0 mmengine ftfy av==13.1.0 liger-kernel==0.5.2 wandb"),
    "step-video-packages": ("2.3.1", "accelerate diffusers sentencepiece imageio flask_restful xfuser==0.4.2rc2"),
    "xdit": ("2.4.1", "accelerate distvae yunchang einops av peft numba"),
    "xdit-apex": ("2.11.0", "accelerate beautifulsoup4 distvae yunchang einops av peft numba"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_profile_has_what_its_project_names(project: Path, name: str) -> None:
    profile = profile_reader_and_overrides.load(name).profile
    torch, packages = NAMED[name]
    has = {one.name: str(one.specifier) for one in map(Requirement, profile.packages)}
    for wanted in map(Requirement, packages.split()):
        assert wanted.name in has
        assert not wanted.specifier or has[wanted.name] == str(wanted.specifier)
    assert profile.torch == torch


@pytest.mark.parametrize("name", ["step-video", "step-video-packages"])
def test_a_torch_that_a_project_names_is_left_out_because_of_an_advisory(project: Path, name: str) -> None:
    plan = plan_resolver.resolve(profile_reader_and_overrides.load(name, {"torch": "2.5.0", "cuda": "12.4"}))
    assert "cudnn-sdpa-2.5.0" in {note.id for note in plan.advisories if note.state == "warned"}
    reasons = " ".join(profile_reader_and_overrides.load(name).profile.partial)
    assert "torch 2.5.0" in reasons and "cudnn-sdpa-2.5.0" in reasons


@pytest.mark.parametrize("name", ["amphion", "onediff-svd", "open-sora", "step-video", "step-video-packages"])
def test_a_profile_without_a_part_of_its_project_is_partial(project: Path, name: str) -> None:
    assert profile_reader_and_overrides.load(name).profile.partial
