"""The image of a lock, described without any of its files: every shipped lock, and the cases that none of them has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from envbuild.fetch.sha256_file_store import Store
from envbuild.image.image_naming import LOCK_LABEL
from envbuild.image.layers.layer_writer import WrittenLayer
from envbuild.image.layers.wheel_layers import WheelOfLayer
from envbuild.image.oci.image_description import ImageDescription, ImageInputs, image_of_lock
from envbuild.lock import lock_file
from envbuild.lock.lock_file import PACKAGES, Lock
from envbuild.util import package_data
from envbuild.util.errors import BuildError, LockError
from unit.support import deb, sha

GOLDEN = Path(__file__).parents[3] / "golden"
SHIPPED = sorted(package_data.PROFILES.rglob("*.lock.yaml"))


def read(file: Path) -> Lock:
    found = lock_file.read(file)
    assert found
    return found


def golden(name: str) -> Lock:
    """A lock of tests/golden, with a Python."""
    lock = read(GOLDEN / name / "lock.yaml")
    return lock if lock.image else replace(lock, base=(*lock.base, deb(f"python{lock.python}", f"{lock.python}.2-6")))


def inputs(lock: Lock, folder: str = "/cache") -> ImageInputs:
    compiled = {one.name: WheelOfLayer(Path(folder, one.name), sha(one.name)) for one in lock.extensions}
    base, apt_base = (Path(folder, f"{sha(str(packages))}.tar") for packages in (lock.base, lock.apt))
    return ImageInputs(base, apt_base, Store(Path(folder, "wheels")), Store(Path(folder, "archives")), compiled)


def described(lock: Lock) -> ImageDescription:
    return image_of_lock(lock, inputs(lock))


def titles(lock: Lock) -> list[str]:
    return [layer.title for layer in described(lock).layers]


def keys(lock: Lock) -> list[str | None]:
    return [layer.recipe.key for layer in described(lock).layers]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name.removesuffix(".lock.yaml"))
def test_every_shipped_lock_can_be_described(file: Path) -> None:
    lock = read(file)
    found = described(lock)
    names = [layer.title for layer in found.layers]
    assert names[0] == "base"
    assert names.index("virtual environment") == (2 if lock.apt else 1)
    assert {locked.layer for locked in lock.wheels} <= set(names)
    assert {one.name for one in lock.extensions} <= set(names)
    late = [name for name in names if name in (PACKAGES, "overrides")]
    assert names[-len(late) :] == late
    assert ("overrides" in names) == bool(lock.overrides)
    assert len(set(keys(lock))) == len(names)
    assert all(sha256 in "".join(layer.history for layer in found.layers) for sha256 in hashes(lock))
    assert found.settings["Labels"] == {LOCK_LABEL: lock.id}
    elsewhere = image_of_lock(lock, inputs(lock, "/elsewhere"))
    assert [layer.recipe.key for layer in elsewhere.layers] == keys(lock)


def hashes(lock: Lock) -> set[str]:
    return {locked.wheel.sha256 for locked in lock.wheels}


def test_images_of_one_torch_share_all_but_their_last_layers() -> None:
    locks = [read(package_data.PROFILES / f"{name}.lock.yaml") for name in ("h20", "a100")]
    first, second = map(keys, locks)
    own = sum(titles(locks[0])[index] == PACKAGES for index in range(len(first)))
    assert first[:-own] == second[:-own]


def test_debian_packages_are_a_difference_of_two_bases() -> None:
    assert titles(golden("apt-layer"))[:3] == ["base", "Debian packages", "virtual environment"]


def test_archives_lie_between_shared_and_own_layers() -> None:
    names = titles(golden("devel-archive"))
    assert [name for name in names if name.startswith("cuda-")] == ["cuda-toolkit 12.6.3", "cuda-compat 580.95.05"]
    assert names.index("torch") < names.index("cuda-toolkit 12.6.3") < names.index(PACKAGES)
    assert "nvcc, of torch's CUDA" not in names  # the links are in the archive's layer


def test_an_archive_of_another_cuda_is_refused() -> None:
    lock = golden("devel-archive")
    first, *others = lock.archives
    with pytest.raises(LockError, match=r"cuda-toolkit 12\.60\.1 is not for CUDA 12\.6"):
        described(replace(lock, archives=(replace(first, version="12.60.1"), *others)))


def test_the_links_of_nvcc_come_last() -> None:
    assert titles(golden("devel-wheels"))[-1] == "nvcc, of torch's CUDA"


def test_a_base_image_is_refused_with_what_to_do() -> None:
    with pytest.raises(BuildError, match="cannot be read without an engine") as caught:
        described(golden("image-base"))
    assert caught.value.hint == "use envbuild build, or name a bootstrap base in the profile"


def test_a_lock_without_python_in_its_base_is_refused() -> None:
    lock = golden("cpu")
    with pytest.raises(BuildError, match="no package python3"):
        described(replace(lock, base=()))


@pytest.mark.parametrize(
    ("package", "release"),
    [("3.11.2-6+deb12u9", "3.11.2"), ("1:3.13.5-2", "3.13.5"), ("3.14.0~rc2-1", "3.14.0"), ("3.9.2", "3.9.2")],
)
def test_the_release_of_python_is_that_of_its_package(package: str, release: str) -> None:
    lock = read(package_data.PROFILES / "cpu.lock.yaml")
    debs = tuple(replace(deb, version=package) if deb.name == "python3.11" else deb for deb in lock.base)
    venv = next(layer for layer in described(replace(lock, base=debs)).layers if layer.title == "virtual environment")
    assert venv.history == f"envbuild: venv of Python {release}"


def test_too_many_layers_are_refused() -> None:
    lock = golden("cpu")
    many = tuple(replace(lock.wheels[0], layer=f"layer-{number}") for number in range(101))
    with pytest.raises(LockError, match="an image can have at most"):
        described(replace(lock, wheels=many))


def test_configuration_and_manifests_are_a_function_of_the_layers() -> None:
    found = described(golden("cpu"))
    layers = tuple(
        WrittenLayer(f"sha256:{sha(f'packed {index}')}", index, f"sha256:{sha(f'plain {index}')}", 2 * index)
        for index in range(len(found.layers))
    )
    image = found.with_layers(layers)
    config = json.loads(image.configuration)
    assert config["rootfs"]["diff_ids"] == [layer.diff_id for layer in layers]
    assert len(config["history"]) == len(layers)
    assert config["config"]["Env"] == sorted(config["config"]["Env"])
    assert "PYTHONDONTWRITEBYTECODE=1" in config["config"]["Env"]
    assert [item["digest"] for item in image.manifest.layers] == [layer.digest for layer in layers]
    assert [item["size"] for item in image.plain_manifest.layers] == [layer.diff_size for layer in layers]
    assert image.manifest.config == image.plain_manifest.config == image.id
    assert found.with_layers(layers[::-1]).id != image.id
