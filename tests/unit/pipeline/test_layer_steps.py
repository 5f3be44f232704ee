"""What is written before an image is loaded: all layers for the containerd store, for graph drivers no wheels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from envbuild.fetch.sha256_file_store import file_digest
from envbuild.image.layers.wheel_layers import WheelLayer, WheelOfLayer
from envbuild.image.oci.image_description import DescribedLayer, ImageDescription
from envbuild.pipeline import layer_steps
from envbuild.pipeline.model import StepResult
from envbuild.pipeline.step_context import StepContext
from unit.image.layers.odd_wheels import odd_wheel
from unit.image.oci.layered_samples import SampleRecipe
from unit.support import PROFILE, lock_for, plan_of

PINS = (("pinned", "2"),)


@pytest.mark.parametrize(
    ("containerd_store", "again", "written"),
    [(False, False, [True, False, False]), (True, False, [True] * 3), (False, True, [True] * 3)],
)
def test_only_wheels_are_left_to_be_written_while_a_graph_driver_receives_them(
    project: Path, monkeypatch: pytest.MonkeyPatch, containerd_store: bool, again: bool, written: list[bool]
) -> None:
    file = odd_wheel(project, {"a": b"1"}, metadata="Requires-Dist: pinned==1\n")
    wheels = (WheelOfLayer(file, file_digest(file)),)
    recipes = (SampleRecipe("base", b"1"), WheelLayer("3.11", wheels), WheelLayer("3.11", wheels, PINS))
    description = ImageDescription("linux/amd64", tuple(DescribedLayer("l", "", one) for one in recipes), {})
    monkeypatch.setattr(layer_steps, "describe_image", lambda *_: StepResult(description))
    monkeypatch.setattr(StepContext, "engine", SimpleNamespace(containerd_store=containerd_store))
    plan = plan_of(project, PROFILE)
    lock = lock_for(plan)
    found = layer_steps.prepare_load(StepContext(cast(Any, MagicMock())), plan, lock, (), again=again).value
    assert [layer.written is not None for layer in found.layers] == written
    complete = layer_steps.write_layers(StepContext(cast(Any, MagicMock())), plan, lock, ()).value
    assert [layer.tar_size for layer in found.layers] == [layer.diff_size for layer in complete.layers]
