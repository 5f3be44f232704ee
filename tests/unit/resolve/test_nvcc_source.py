"""The source of nvcc, and that forward-compatibility libraries come only with old drivers of datacentre GPUs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from envbuild.facts import database, extension_compilers
from envbuild.fetch.archive_spec import COMPAT
from envbuild.image import extension_dockerfile
from envbuild.resolve.plan_resolver import Plan
from envbuild.util.errors import ProfileError
from unit.support import PROFILE, lock_for, plan_of, sha

IMAGE = f"registry.example/cuda@sha256:{'a' * 64}"
FILE = {"sha256": sha("file"), "url": "https://mirror.example/file.tar"}
# A profile with CUDA 13, and one with CUDA 12.
NEW: dict[str, Any] = {**PROFILE, "gpus": ["h200"], "torch": "2.11.0"}
OLD: dict[str, Any] = {**PROFILE, "gpus": ["a100"], "torch": "2.7.1"}
ON_IMAGE: dict[str, Any] = {"base": {"image": IMAGE}, "apt": []}
HOME = "/opt/venv/lib/python3.11/site-packages/nvidia/cu13"


def refused(folder: Path, data: dict[str, Any]) -> list[tuple[str | None, str]]:
    with pytest.raises(ProfileError) as caught:
        plan_of(folder, data)
    return [(fault.field, fault.message) for fault in caught.value.faults]


def path(plan: Plan) -> list[str]:
    return plan.environment["PATH"].split(":")


def test_a_runtime_image_has_no_nvcc(project: Path) -> None:
    plan = plan_of(project, NEW)
    assert (plan.toolchain, plan.archives) == (None, ())
    assert "CUDA_HOME" not in plan.environment
    assert {"archives"} & set(plan.inputs) == set()


def test_a_named_toolchain_alone_puts_none_into_the_image(project: Path) -> None:
    for toolchain in ("wheels", FILE):
        named = plan_of(project, {**NEW, "toolchain": toolchain})
        assert named.inputs == plan_of(project, NEW).inputs
        assert named.toolchain is None


def test_from_cuda_13_on_it_comes_as_wheels(project: Path) -> None:
    for more in ({}, {"toolchain": "wheels"}, ON_IMAGE):
        plan = plan_of(project, {**NEW, "variant": "devel", **more})
        assert plan.toolchain
        assert (plan.toolchain.home, plan.toolchain.release, plan.toolchain.archive) == (HOME, "13.0", None)
        # torch 2.11 brings the libraries itself
        assert plan.toolchain.requirements == ("cuda-toolkit[nvcc,cccl,crt,nvvm,profiler]==13.0.*",)
        assert plan.environment["CUDA_HOME"] == HOME
        assert path(plan)[:3] == ["/opt/venv/bin", f"{HOME}/bin", "/usr/local/sbin"]


@pytest.mark.parametrize("release", [row for row in database.torch_releases().values() if row.cuda.startswith("13.")])
def test_wheels_ask_for_nothing_that_torch_brings(project: Path, release: database.TorchRelease) -> None:
    """torch 2.12 allows a range of cuBLAS versions, which the meta-package would narrow."""
    plan = plan_of(project, {**NEW, "variant": "devel", "torch": release.version})
    assert plan.toolchain
    (requirement,) = plan.toolchain.requirements
    extras = requirement.partition("[")[2].partition("]")[0].split(",")
    assert extras[:4] == ["nvcc", "cccl", "crt", "nvvm"]
    assert requirement.endswith(f"]=={release.cuda}.*")
    brought = {**release.pins, **release.expands_to}
    assert [extra for extra in extras if database.distribution_of(extra, release.cuda) in brought] == []
    wanted = extension_compilers.compiler_wheels()[13].extras
    left_out = [extra for extra in wanted if extra not in extras]
    assert all(database.distribution_of(extra, release.cuda) in brought for extra in left_out)


def test_an_archive_must_be_of_torchs_release(project: Path) -> None:
    plan = plan_of(project, {**OLD, "variant": "devel", "toolchain": FILE})
    assert plan.toolchain
    assert (plan.toolchain.home, plan.toolchain.requirements) == ("/usr/local/cuda", ())
    (wanted,) = plan.archives
    assert (wanted.name, wanted.sha256, wanted.url, wanted.fits) == (
        "cuda-toolkit", FILE["sha256"], FILE["url"], "==12.6.*",
    )  # fmt: skip
    assert (wanted.at.file, wanted.at.field) == ("profiles/sample.yaml", "toolchain")


def test_a_devel_image_has_its_own(project: Path) -> None:
    plan = plan_of(project, {**OLD, **ON_IMAGE, "variant": "devel", "toolchain": "base"})
    assert plan.toolchain
    assert (plan.toolchain.home, plan.toolchain.release, plan.archives) == ("/usr/local/cuda", "12.6", ())
    assert path(plan)[1] == "/usr/local/cuda/bin"


def test_a_local_build_says_its_cuda_itself(project: Path) -> None:
    local = {**NEW, "torch": "2.11.0+cu131"}
    assert refused(project, {**local, "variant": "devel"}) == [
        ("variant", "unknown CUDA release of torch 2.11.0+cu131: set cuda: in the profile")
    ]
    plan = plan_of(project, {**local, "variant": "devel", "cuda": "13.1"})
    assert plan.toolchain
    assert plan.toolchain.requirements == (
        f"cuda-toolkit[{','.join(extension_compilers.compiler_wheels()[13].extras)}]==13.1.*",
    )


@pytest.mark.parametrize(
    ("data", "field", "words"),
    [
        (
            {**OLD, "variant": "devel"},
            "variant",
            "nvcc of CUDA 12.6 is not available as wheels (the wheels of nvidia-cuda-nvcc-cu12",
        ),
        ({**OLD, "toolchain": "wheels"}, "toolchain", "set an archive of its toolkit"),
        ({**OLD, "variant": "devel"}, "variant", "a devel image as base and toolchain: base"),
        ({**OLD, "toolchain": "base"}, "toolchain", "a bootstrap base has no nvcc: name a devel image of CUDA 12.6"),
        ({**PROFILE, "variant": "devel"}, "variant", "torch 2.13.0+cpu has no CUDA to compile for"),
        ({**OLD, "torch": "2.0.1", "variant": "devel"}, "variant", "nvcc of CUDA 11.7 is not available as wheels: set"),
    ],
)
def test_an_impossible_request_is_refused_with_a_remedy(
    project: Path, data: dict[str, Any], field: str, words: str
) -> None:
    found = refused(project, data)
    assert [field for field, message in found if words in message] == [field]


def test_each_variant_has_its_own_lock(project: Path) -> None:
    runtime, devel = plan_of(project, NEW), plan_of(project, {**NEW, "variant": "devel"})
    before = lock_for(runtime)
    assert lock_for(devel).id != before.id
    assert before.stale(devel) == ["wheels", "environment"]
    by_archive = plan_of(project, {**NEW, "variant": "devel", "toolchain": FILE})
    assert lock_for(devel).stale(by_archive) == ["wheels", "environment", "archives"]
    other = plan_of(project, {**NEW, "variant": "devel", "toolchain": {**FILE, "sha256": sha("other")}})
    assert lock_for(by_archive).stale(other) == ["archives"]
    moved = plan_of(project, {**NEW, "variant": "devel", "toolchain": {"sha256": FILE["sha256"]}})
    assert lock_for(by_archive).stale(moved) == []


# forward-compatibility libraries

COMPAT_DRIVER = {"minimum": "550.54.14", "compat": FILE}


def test_with_them_an_older_driver_will_do(project: Path) -> None:
    old = {"minimum": "550.54.14"}
    assert any("driver-too-old-cu13" in message for _, message in refused(project, {**NEW, "driver": old}))
    plan = plan_of(project, {**NEW, "driver": COMPAT_DRIVER})
    assert "driver-too-old-cu13" not in {item.id for item in plan.choice.advisories}
    assert plan.choice.situation.driver == "550.54.14"
    (wanted,) = plan.archives
    assert (wanted.name, wanted.sha256, wanted.fits) == (COMPAT, FILE["sha256"], ">=580")
    assert wanted.at.field == "driver.compat"


def test_compatibility_libraries_are_not_in_the_path_of_the_loader(project: Path) -> None:
    """NVIDIA's container toolkit adds these libraries to the path if the host's driver is older."""
    plan = plan_of(project, {**NEW, "driver": COMPAT_DRIVER})
    assert plan.environment == plan_of(project, NEW).environment
    assert lock_for(plan).id != lock_for(plan_of(project, NEW)).id


@pytest.mark.parametrize(
    "card", [gpu.id for gpu in database.gpus().values() if gpu.compute_capability >= "8.0" and gpu.host == "amd64"]
)
def test_they_are_for_datacentre_gpus(project: Path, card: str) -> None:
    data = {**OLD, "torch": "2.9.1", "gpus": [card], "driver": {"compat": FILE}}
    if database.gpus()[card].datacentre:
        assert plan_of(project, data).archives
    else:
        (message,) = [text for field, text in refused(project, data) if field == "driver.compat"]
        assert f"on {card}, CUDA can fail with error 804" in message
        assert "NVIDIA/nvidia-docker#1294" in message


def test_one_other_gpu_of_a_fleet_is_enough(project: Path) -> None:
    found = refused(project, {**NEW, "gpus": ["h200", "rtx4090", "a100"], "driver": COMPAT_DRIVER})
    assert [message for field, message in found if "on rtx4090, CUDA" in message] != []


def test_they_are_nothing_for_the_cpu(project: Path) -> None:
    ((field, message),) = refused(project, {**PROFILE, "driver": {"compat": FILE}})
    assert (field, "this profile lists no GPU" in message) == ("driver.compat", True)


def test_an_unknown_gpu_is_the_only_fault(project: Path) -> None:
    data = {**OLD, "gpus": ["nosuch"], "driver": {"compat": FILE}}
    assert [field for field, _ in refused(project, data)] == ["gpus[0]"]


# extensions

KERNELS: dict[str, Any] = {"name": "kernels", "git": "https://git.example/k", "commit": "c" * 40, "modules": ["k"]}


def test_an_extension_is_compiled_without_nvcc_in_the_image(project: Path) -> None:
    plan = plan_of(project, {**NEW, "gpus": ["h200", "a100"], "extensions": [KERNELS]})
    assert (plan.toolchain, plan.archives) == (None, ())
    assert "CUDA_HOME" not in plan.environment
    extension_toolchain = plan.extension_toolchain
    assert extension_toolchain
    assert (extension_toolchain.arch, extension_toolchain.toolchain.home, extension_toolchain.toolchain.release) == (
        "8.0;9.0",
        HOME,
        "13.0",
    )
    assert extension_toolchain.requires == ("ninja", "setuptools", "wheel")


def test_a_devel_image_compiles_with_the_nvcc_that_it_keeps(project: Path) -> None:
    plan = plan_of(project, {**OLD, "variant": "devel", "toolchain": FILE, "extensions": [KERNELS]})
    assert plan.toolchain and plan.extension_toolchain and plan.extension_toolchain.toolchain == plan.toolchain
    made = lock_for(plan)
    assert made.builder and made.nvcc == made.builder.nvcc and made.builder.archives == ()


def test_only_an_archive_that_is_not_in_the_image_is_unpacked_for_the_build(project: Path) -> None:
    plan = plan_of(project, {**OLD, "toolchain": FILE, "extensions": [KERNELS]})
    assert plan.archives == () and plan.extension_toolchain
    archive = plan.extension_toolchain.toolchain.archive
    assert archive and (archive.sha256, archive.fits) == (FILE["sha256"], "==12.6.*")


def test_one_that_is_left_out_asks_for_nothing(project: Path) -> None:
    left_out = {"name": "apex", "none": "nobody needs it"}
    plan = plan_of(project, {**OLD, "extensions": [left_out]})
    assert plan.extension_toolchain is None
    assert plan.inputs == plan_of(project, OLD).inputs
    assert plan.reasons["apex"].endswith("none: nobody needs it")


def test_the_inputs_of_an_extension_have_its_content_without_its_address(project: Path) -> None:
    def inputs(**change: Any) -> object:
        return plan_of(project, {**NEW, "extensions": [{**KERNELS, **change}]}).inputs["extensions"]

    assert inputs(git="https://mirror.example/k") == inputs()
    for change in ({"commit": "d" * 40}, {"modules": ["k", "l"]}, {"build": {"env": {"A": "1"}}},
                   {"build": {"settings": ["--build-option=--a"]}}, {"build": {"requires": ["cmake"]}}):  # fmt: skip
        assert inputs(**change) != inputs()


# nvcc of Debian

PACKAGED: dict[str, Any] = {
    **PROFILE, "base": {"bootstrap": "trixie"}, "python": "3.13", "torch": "2.6.0", "gpus": ["a100"],
    "toolchain": "debian", "extensions": [KERNELS],
}  # fmt: skip


def test_debians_nvcc_compiles_with_the_host_compiler_that_goes_with_it(project: Path) -> None:
    """trixie's own g++ is too new for CUDA 12.4; with any other toolchain this is refused."""
    plan = plan_of(project, PACKAGED)
    assert (plan.toolchain, plan.archives) == (None, ()) and plan.extension_toolchain
    found = plan.extension_toolchain.toolchain
    assert (found.home, found.release, found.requirements) == ("/usr", "12.4", ())
    made = lock_for(plan)
    assert made.builder and {deb.name for deb in made.builder.debs} == {"nvidia-cuda-toolkit", "g++-13"}
    assert not {"nvidia-cuda-toolkit"} & {deb.name for deb in (*made.base, *made.apt)}
    command = extension_dockerfile.compile_command(made.extensions[0], made.builder)
    assert {"CC=gcc-13", "CXX=g++-13", "CUDA_HOME=/usr"} <= set(command)
    ((field, message),) = refused(project, {**PACKAGED, "toolchain": FILE})
    assert field == "base.bootstrap" and "g++ 14" in message


def test_a_profiles_own_compiler_comes_before_debians(project: Path) -> None:
    entry = {**KERNELS, "build": {"env": {"CXX": "ccache g++-13"}}}
    made = lock_for(plan_of(project, {**PACKAGED, "extensions": [entry]}))
    assert made.builder
    assert "CXX=ccache g++-13" in extension_dockerfile.compile_command(made.extensions[0], made.builder)


def test_packages_from_debian_are_inputs_of_the_plan(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan_of(project, PACKAGED).inputs["extensions"]
    (row,) = extension_compilers.debian("12.4")
    for change in ({"packages": ("nvcc",)}, {"components": ("main",)}, {"environment": {"CC": "gcc-12"}}):
        changed = (dataclasses.replace(row, **change),)
        monkeypatch.setattr(extension_compilers, "debian", lambda cuda, rows=changed: rows)
        assert plan_of(project, PACKAGED).inputs["extensions"] != before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"torch": "2.7.1"}, "Debian trixie has no nvcc of CUDA 12.6 (known: none in any suite)"),
        ({"base": {"bootstrap": "bookworm"}, "python": "3.11"}, "Debian bookworm has no nvcc of CUDA 12.4 (known: tr"),
        ({"base": {"image": IMAGE}, "apt": []}, "need a bootstrap base"),
        ({"variant": "devel"}, "contain libcuda"),
    ],
)
def test_a_package_missing_in_debian_is_reported_with_a_remedy(
    project: Path, change: dict[str, Any], words: str
) -> None:
    assert [field for field, text in refused(project, {**PACKAGED, **change}) if words in text] == ["toolchain"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"torch": "2.7.1"}, "use an archive of the toolkit (toolchain: {sha256, url}), or a devel image"),
        (
            {"torch": "2.7.1"},
            "or use a torch for CUDA 12.4, whose nvcc is in trixie (Python 3.13): 2.5.0, 2.5.1, 2.6.0",
        ),
        ({"base": {"bootstrap": "bookworm"}, "python": "3.11"}, "use trixie as base.bootstrap, with its Python 3.13"),
        ({"torch": "2.11.0"}, ": remove toolchain, and nvcc comes as wheels"),
    ],
)
def test_where_debian_has_none_other_ways_are_named(project: Path, change: dict[str, Any], words: str) -> None:
    assert [field for field, text in refused(project, {**PACKAGED, **change}) if words in text] == ["toolchain"]


def test_no_torch_is_offered_that_has_no_code_for_the_gpu(project: Path) -> None:
    found = refused(project, {**PACKAGED, "torch": "2.7.1", "gpus": ["rtx5090"]})
    assert not any("a torch of CUDA 12.4" in text for _, text in found)


def test_a_profile_without_a_toolchain_gets_the_one_of_debian_suggested(project: Path) -> None:
    without = {key: value for key, value in PACKAGED.items() if key != "toolchain"}
    assert any("toolchain: debian, on trixie" in text for _, text in refused(project, without))
