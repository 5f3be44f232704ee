"""Tests of `image_of_lock`, which describes the image of a lock without reading the files that the image will contain:
with every shipped lock, and for cases that no shipped lock has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envbuild.fetch.archive_spec import COMPAT, TOOLKIT
from envbuild.fetch.sha256_file_store import Store
from envbuild.image.image_naming import LOCK_LABEL
from envbuild.image.layers.archive_layers import ArchiveLayer
from envbuild.image.layers.base_image_contents import BaseContents, BaseFolder, BaseLayerRef
from envbuild.image.layers.base_image_layers import (
    BaseBlobLayer,
    BaseImageFoldersLayer,
    BaseImageNvccLinksLayer,
    BaseImageVenvLayer,
)
from envbuild.image.layers.file_tree_of_layers import FolderOwnership
from envbuild.image.layers.layer_writer import WrittenLayer
from envbuild.image.layers.wheel_layers import WheelOfLayer
from envbuild.image.oci.base_image_download import BaseImage
from envbuild.image.oci.image_description import ImageDescription, ImageInputs, image_of_lock
from envbuild.lock import lock_file
from envbuild.lock.lock_entry_types import Nvcc
from envbuild.lock.lock_file import PACKAGES, Lock
from envbuild.registry import oci_types
from envbuild.registry.image_content_reader import Config
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
    assert [layer.tar_size for layer in image.to_load.layers] == [layer.diff_size for layer in layers]
    assert image.manifest.config == image.id
    assert image.to_load.complete is image
    assert found.with_layers(layers[::-1]).id != image.id


# images on a base image

TAR = "application/vnd.oci.image.layer.v1.tar"
GZIP, ZSTD = f"{TAR}+gzip", f"{TAR}+zstd"
HISTORY = (
    {"created_by": "ADD rootfs", "created": "2025-01-01T00:00:00Z"},
    {"created_by": "ENV A=b", "empty_layer": True},
    {"created_by": "RUN x"},
    {"created_by": "CMD sh", "empty_layer": True},
)


def digest(text: str) -> str:
    return f"sha256:{sha(text)}"


def base_image(**settings: object) -> BaseImage:
    layers = (
        BaseLayerRef(digest("one"), 1, digest("tar of one"), TAR),
        BaseLayerRef(digest("two"), 2, digest("tar of two"), ZSTD),
    )
    environment = {"PATH": "/usr/bin", "CONDA": "/opt/conda", "HOME": "/root"}
    labels = {"vendor": "x", LOCK_LABEL: "of another lock"}
    config = Config(digest("config"), tuple(layer.diff_id for layer in layers), labels, environment, settings)
    return BaseImage("registry.example/base@sha256:0", digest("manifest"), layers, config, HISTORY)


CONTENTS = BaseContents(
    interpreter="/usr/bin/python3.12",
    executable="/opt/conda/bin/python3.12",
    version="3.12.4",
    templates={"activate": "x"},
    nvcc="12.6",
    library_folder="/usr/local/cuda-12.6/lib64",
    libraries=("libcudart.so.12",),
    lib64="",
    folders={TOOLKIT: "/usr/local/cuda-12.6", COMPAT: "/usr/local/cuda-12.6/compat"},
)


def on_base(lock: Lock, image: BaseImage | None = None, contents: BaseContents = CONTENTS) -> ImageDescription:
    return image_of_lock(lock, replace(inputs(lock), on_image=(image or base_image(), contents)))


def configuration(found: ImageDescription) -> dict[str, Any]:
    layers = [WrittenLayer(digest(f"packed {n}"), n, digest(f"plain {n}"), n) for n in range(len(found.layers))]
    document: dict[str, Any] = json.loads(found.with_layers(layers).configuration)
    return document


def test_the_layers_of_a_base_image_come_first_with_their_types() -> None:
    found = on_base(golden("image-base"))
    assert [layer.title for layer in found.layers] == [
        "base image, layer 1", "base image, layer 2", "virtual environment", "python", "torch"
    ]  # fmt: skip
    assert [layer.media_type for layer in found.layers] == [TAR, ZSTD, GZIP, GZIP, GZIP]
    one, two, venv = (layer.recipe for layer in found.layers[:3])
    assert isinstance(one, BaseBlobLayer) and isinstance(two, BaseBlobLayer) and isinstance(venv, BaseImageVenvLayer)
    assert (one.digest, two.diff_id) == (digest("one"), digest("tar of two"))
    assert (venv.interpreter, venv.executable, venv.version) == (
        CONTENTS.interpreter, CONTENTS.executable, CONTENTS.version
    )  # fmt: skip
    layers = [WrittenLayer(digest(f"packed {n}"), 10 + n, digest(f"plain {n}"), 20 + n) for n in range(5)]
    image = found.with_layers(layers)
    assert [item["mediaType"] for item in image.manifest.layers] == [TAR, ZSTD, GZIP, GZIP, GZIP]
    assert [item["size"] for item in image.manifest.layers] == [10, 11, 12, 13, 14], "not those of the base's manifest"


def test_the_history_of_a_base_image_is_kept_with_its_empty_entries() -> None:
    history = configuration(on_base(golden("image-base")))["history"]
    assert history[: len(HISTORY)] == list(HISTORY)
    own = history[len(HISTORY) :]
    assert own[0]["created_by"] == "envbuild: venv of Python 3.12.4"
    assert len(own) == 3 and all("empty_layer" not in entry for entry in own)


def test_the_configuration_of_a_base_image_is_merged() -> None:
    lock = golden("image-base")
    settings = {
        "Entrypoint": ["/entry"], "Cmd": ["sh"], "User": "1000", "OnBuild": ["RUN x"], "Hostname": "h",
        "WorkingDir": "/workspace", "Shell": ["/bin/bash"], "Volumes": {"/data": {}},
        "ExposedPorts": {"80/tcp": {}}, "StopSignal": "SIGINT", "Healthcheck": {"Test": ["NONE"]},
    }  # fmt: skip
    config = configuration(on_base(lock, base_image(**settings)))["config"]
    variables = config.pop("Env")
    assert config == {
        "Cmd": ["python"], "User": "0", "WorkingDir": "/workspace", "Labels": {"vendor": "x", LOCK_LABEL: lock.id},
        "Shell": ["/bin/bash"], "Volumes": {"/data": {}}, "ExposedPorts": {"80/tcp": {}}, "StopSignal": "SIGINT",
        "Healthcheck": {"Test": ["NONE"]},
    }  # fmt: skip
    assert variables == sorted(variables)
    environment = dict(variable.split("=", 1) for variable in variables)
    assert environment == {"CONDA": "/opt/conda", "PYTHONDONTWRITEBYTECODE": "1", **lock.environment}
    assert environment["HOME"] == "/tmp", "the lock's variables replace those of the base"


def test_without_a_folder_in_the_base_image_the_root_is_the_working_folder() -> None:
    config = configuration(on_base(golden("image-base")))["config"]
    assert (config["WorkingDir"], config["User"]) == ("/", "0")


def toolkit_of_base() -> Lock:
    return replace(golden("image-base"), nvcc=Nvcc("/usr/local/cuda", "12.6"))


def test_the_nvcc_of_a_base_image_gets_its_missing_links() -> None:
    found = on_base(toolkit_of_base())
    last = found.layers[-1]
    assert (last.title, last.history) == ("nvcc, of the base image", "envbuild: links of nvcc 12.6 in /usr/local/cuda")
    assert isinstance(last.recipe, BaseImageNvccLinksLayer)
    assert [(link.path, link.target) for link in last.recipe.links()] == [
        ("usr/local/cuda-12.6/lib64/libcudart.so", "libcudart.so.12")
    ]
    whole = replace(CONTENTS, libraries=("libcudart.so", "libcudart.so.12"))
    assert on_base(toolkit_of_base(), contents=whole).layers[-1].title == "torch"


@pytest.mark.parametrize(("release", "said"), [("12.8", "of CUDA 12.8"), ("", "missing or of an unknown release")])
def test_an_nvcc_of_another_release_in_a_base_image_is_refused(release: str, said: str) -> None:
    with pytest.raises(BuildError, match=f"/usr/local/cuda/bin/nvcc of the base image is {said}") as caught:
        on_base(toolkit_of_base(), contents=replace(CONTENTS, nvcc=release))
    assert caught.value.hint == "name a devel image of CUDA 12.6 as base"


def test_an_archive_goes_where_the_links_of_a_base_image_lead() -> None:
    archives, nvcc = golden("devel-archive").archives, golden("devel-archive").nvcc
    lock = replace(golden("image-base"), archives=archives, nvcc=nvcc)
    recipes = [layer.recipe for layer in on_base(lock).layers if isinstance(layer.recipe, ArchiveLayer)]
    assert [recipe.folder for recipe in recipes] == ["/usr/local/cuda-12.6", "/usr/local/cuda-12.6/compat"]
    plain = replace(CONTENTS, folders={TOOLKIT: "/usr/local/cuda", COMPAT: "/usr/local/cuda/compat"})
    same = [layer.recipe for layer in on_base(lock, contents=plain).layers if isinstance(layer.recipe, ArchiveLayer)]
    assert [recipe.folder for recipe in same] == ["", ""]
    own = [
        layer.recipe for layer in described(golden("devel-archive")).layers if isinstance(layer.recipe, ArchiveLayer)
    ]
    assert [recipe.key for recipe in same] == [recipe.key for recipe in own]
    assert not {recipe.key for recipe in same} & {recipe.key for recipe in recipes}
    assert on_base(lock).layers[-1].title != "nvcc, of the base image", "the links are in the archive's layer"


def test_the_layers_of_a_base_image_count() -> None:
    image = base_image()
    many = replace(image, layers=image.layers * 62, history=())
    with pytest.raises(
        LockError, match="the lock needs 127 layers, 124 of them of the base image; an image can have at most"
    ):
        on_base(golden("image-base"), many)


ODD = {
    path: BaseFolder(path, FolderOwnership(0o2775, 0, 50))
    for path in ("/opt", "/usr", "/usr/local", "/usr/local/cuda-12.6", "/usr/local/cuda-12.6/lib64", "/op")
}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("wheels", ["/opt"]),
        ("nvcc of wheels", ["/opt"]),
        ("archives", ["/opt", "/usr", "/usr/local", "/usr/local/cuda-12.6"]),
        ("nvcc", ["/opt", "/usr", "/usr/local", "/usr/local/cuda-12.6", "/usr/local/cuda-12.6/lib64"]),
    ],
)
def test_folders_of_a_base_image_keep_their_mode_and_owner(kind: str, expected: list[str]) -> None:
    """The last layer restores the folders that other layers change."""
    archives = replace(golden("image-base"), archives=golden("devel-archive").archives)
    of_wheels = replace(golden("image-base"), nvcc=golden("devel-wheels").nvcc)
    nvcc = {"nvcc of wheels": of_wheels, "nvcc": toolkit_of_base()}
    lock = {"wheels": golden("image-base"), "archives": archives, **nvcc}[kind]
    found = on_base(lock, contents=replace(CONTENTS, odd_folders=tuple(ODD.values())))
    last = found.layers[-1]
    assert isinstance(last.recipe, BaseImageFoldersLayer)
    assert [folder.path for folder in last.recipe.folders] == expected
    assert (last.media_type, last.title) == (oci_types.LAYER_GZIP, "folders of the base image")
    plain = on_base(lock, contents=replace(CONTENTS, odd_folders=(ODD["/op"],)))
    assert found.layers[:-1] == plain.layers == on_base(lock).layers, "the other layers are shared"
