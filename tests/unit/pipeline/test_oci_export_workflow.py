"""`export oci` with the wheels of a lock that are in the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from envbuild.fetch import sha256_file_store
from envbuild.image.layers.wheel_layers import WheelLayer, WheelOfLayer
from envbuild.image.oci import layer_blobs
from envbuild.image.oci.image_description import DescribedLayer, ImageDescription
from envbuild.pipeline import oci_export_workflow
from envbuild.pipeline.model import StepResult
from envbuild.util import user_folders
from envbuild.util.errors import HashMismatch
from unit.site import Site, proved
from unit.support import is_locked


@pytest.fixture
def site(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with proved(project, monkeypatch) as found:
        monkeypatch.setattr(oci_export_workflow, "describe_image", lambda *_: StepResult(described(found)))
        yield found


def stored(site: Site) -> list[Path]:
    """The lock's wheels in the store."""
    store = sha256_file_store.wheel_store()
    return [store.path(one.wheel.sha256, one.wheel.file) for one in site.lock.wheels]


def described(site: Site) -> ImageDescription:
    """An image with one layer for each wheel."""
    wheels = (WheelOfLayer(file, file.parent.name) for file in stored(site))
    layers = (DescribedLayer(one.file.name, "", WheelLayer("3.11", (one,))) for one in wheels)
    return ImageDescription("linux/amd64", tuple(layers), {})


def export(target: str) -> oci_export_workflow.ExportedImage:
    return oci_export_workflow.export_image("sample", Path(target), MagicMock())


@pytest.mark.parametrize("target", ["image.tar", "image"])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("where", [0, 40, -30])
def test_a_damaged_wheel_is_removed_and_named(site: Site, target: str, known: bool, where: int) -> None:
    """The wheel is removed whether the digest of its layer is known or not, and wherever the damaged byte is.
    Otherwise, each later run would fail too."""
    good = ""
    if known:
        layer_blobs.learn_layers(described(site), lambda line: None)
        good = export("good").digest
    wheel = stored(site)[0]
    content = bytearray(wheel.read_bytes())
    content[where] ^= 1
    wheel.write_bytes(content)
    if known and where == 40:  # the layer has the known digest, because nothing in it depends on this byte
        assert export(target).digest == good
        return
    with pytest.raises(HashMismatch, match=f"{wheel.name} was damaged on this disk") as caught:
        export(target)
    assert "run the same command again" in str(caught.value.hint)
    assert [file.exists() for file in stored(site)] == [False] + [True] * (len(site.lock.wheels) - 1)
    assert not Path(target).is_file()


def test_both_forms_have_the_same_manifest(site: Site) -> None:
    assert export("image.tar").digest == export("image").digest


def test_layers_for_a_tar_are_written_by_one_process_at_a_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    learn, held = layer_blobs.learn_layers, list[bool]()

    def watched(*arguments: Any) -> Any:
        held.append(is_locked(user_folders.cache_folder("locks") / "_layers.lock"))
        return learn(*arguments)

    monkeypatch.setattr(layer_blobs, "learn_layers", watched)
    export("image.tar")
    assert held == [True]
