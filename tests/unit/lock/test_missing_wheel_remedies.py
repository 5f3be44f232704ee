"""Packages that an index has only as source: the error names all of them, and what to do about each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from envbuild.fetch import apt_resolution_and_download, index_pages
from envbuild.fetch.index_pages import Listed
from envbuild.lock import lock_creation_and_update, missing_wheel_remedies
from envbuild.profile.extension_spec import Extension
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.util.errors import NetworkError, ProfileError
from unit.support import PROFILE, Index, envbuild, plan_of, quick_pip, serving, write_profile, write_wheel

SMALL = {**PROFILE, "torch": "2.11.0", "gpus": ["h20"], "packages": [], "apt": []}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    quick_pip(monkeypatch)
    monkeypatch.setattr(apt_resolution_and_download, "resolve_debs", lambda *words, **more: [])
    folder = tmp_path / "links"
    write_wheel(folder, "pip", "26.0")
    write_wheel(folder, "torch", "2.11.0")
    write_wheel(folder, "alpha", "1.0")
    for name in ("flash_attn-2.8.3", "pure-1.0.9", "old-1.0"):
        (folder / f"{name}.tar.gz").write_bytes(name.encode())
    write_wheel(folder, "old", "2.0")
    with serving(Index(folder)) as found:
        monkeypatch.setenv("PIP_INDEX_URL", found.address)
        yield found


def test_all_packages_without_a_wheel_are_named_with_what_to_do(project: Path, index: Index) -> None:
    plan = plan_of(project, {**SMALL, "packages": ["alpha", "flash-attn>=2.6", "pure", "old"]})
    with pytest.raises(ProfileError) as caught:
        lock_creation_and_update.update_lock(plan, None)
    hint = str(caught.value.hint)
    assert "pip wheel --no-deps -w wheels pure==1.0.9\n" in hint and "UV_FIND_LINKS=wheels" in hint
    assert (
        "only source on the index: flash-attn 2.8.3\nit needs these packages too: einops\n"
        "to compile it for torch 2.11.0 and compute capability 9.0" in hint
    )


def test_the_proposed_entry_is_a_valid_extension(project: Path, index: Index) -> None:
    plan = plan_of(project, {**SMALL, "packages": ["flash-attn"]})
    text = str(missing_wheel_remedies.remedies(plan, "Because all versions of flash-attn have no usable wheels"))
    stanza = yaml.safe_load(text[text.index("extensions:") :])
    (entry,) = stanza["extensions"]
    found = Extension.model_validate(entry)
    assert (found.name, found.modules) == ("flash-attn", ("flash_attn_2_cuda",))
    assert found.sdist is not None and len(found.sdist.sha256) == 64


def test_the_entry_names_the_gpus_as_the_build_of_the_package_reads_them(project: Path, index: Index) -> None:
    plan = plan_of(project, {**SMALL, "gpus": ["a100", "l40s", "h20"], "packages": ["flash-attn"]})
    text = str(missing_wheel_remedies.remedies(plan, "Because all versions of flash-attn have no usable wheels"))
    (entry,) = yaml.safe_load(text[text.index("extensions:") :])["extensions"]
    assert entry["build"]["env"] == {"FLASH_ATTENTION_FORCE_BUILD": "TRUE", "FLASH_ATTN_CUDA_ARCHS": "80;90"}


def test_a_package_with_a_wheel_of_a_pre_release_alone_is_compiled(project: Path, index: Index, tmp_path: Path) -> None:
    write_wheel(tmp_path / "links", "flash_attn", "0.3.dev5")
    plan = plan_of(project, {**SMALL, "packages": ["flash-attn"]})
    with pytest.raises(ProfileError) as caught:
        lock_creation_and_update.update_lock(plan, None)
    assert "require it: flash-attn==0.3.dev5\nonly source on the index: flash-attn 2.8.3\n" in str(caught.value.hint)


def test_a_gpu_that_a_package_does_not_support_is_named_instead(project: Path, index: Index) -> None:
    plan = plan_of(project, {**SMALL, "gpus": ["t4"], "packages": ["flash-attn", "pure"]})
    text = str(missing_wheel_remedies.remedies(plan, "Because all versions of flash-attn have no usable wheels"))
    assert "flash-attn 2.8.3 has no kernels for compute capability 7.5: remove it" in text
    assert "extensions:" not in text and "flash-attn==" not in text and "pure==1.0.9" in text


def test_the_entries_of_the_profile_are_repeated(project: Path, index: Index) -> None:
    """A list of a profile replaces that of the profile that it extends."""
    own = {"name": "kernels", "git": "https://git.example/k", "commit": "c" * 40, "modules": ["kernels"],
           "build": {"env": {"CC": "gcc"}}}  # fmt: skip
    plan = plan_of(project, {**SMALL, "cuda": "13.0", "extensions": [own], "packages": ["flash-attn"]})
    text = str(missing_wheel_remedies.remedies(plan, "Because all versions of flash-attn have no usable wheels"))
    entries = yaml.safe_load(text[text.index("extensions:") :])["extensions"]
    assert entries[0] == own and entries[1]["name"] == "flash-attn" and "compiler is missing" not in text


def test_a_compiler_that_is_missing_too_is_named(project: Path, index: Index) -> None:
    plan = plan_of(project, {**SMALL, "torch": "2.7.1", "packages": ["flash-attn"]})
    text = str(missing_wheel_remedies.remedies(plan, "Because all versions of flash-attn have no usable wheels"))
    assert "their compiler is missing too: nvcc of CUDA 12.6 is not available as wheels" in text


def test_a_torch_with_which_a_release_does_not_compile_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SMALL, "torch", "2.14.0")
    text = proposed(project, monkeypatch, Listed("flash_attn-2.8.3.tar.gz", "0" * 64))
    assert text == "flash-attn 2.8.3 does not compile with torch 2.14.0: use a torch below 2.14"
    newer = proposed(project, monkeypatch, Listed("flash_attn-2.9.0.tar.gz", "0" * 64))
    assert "extensions:" in newer


def proposed(project: Path, monkeypatch: pytest.MonkeyPatch, *files: Listed) -> str:
    """Return what is proposed for flash-attn, of which the index lists these files."""
    monkeypatch.setattr(index_pages, "listed_files", lambda name: files)
    plan = plan_of(project, {**SMALL, "packages": ["flash-attn"]})
    return str(missing_wheel_remedies.remedies(plan, "Because all versions of flash-attn have no usable wheels"))


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ('https://a.example/f.tar.gz", none: "', 'https://a.example/f.tar.gz", none: "'),
        ("https://a.example/\u00fc.tar.gz", "https://a.example/\u00fc.tar.gz"),
        ("https://a.example/f.tar.gz\nrun: [x]", None),
    ],
)
def test_an_address_of_the_index_stays_one_value_of_the_entry(
    project: Path, monkeypatch: pytest.MonkeyPatch, address: str, url: str | None
) -> None:
    text = proposed(project, monkeypatch, Listed("flash_attn-2.8.3.tar.gz", "0" * 64, address=address))
    (entry,) = yaml.safe_load(text[text.index("extensions:") :])["extensions"]
    assert entry["sdist"].get("url") == url and set(entry) == {"name", "sdist", "build", "modules"}


def test_a_sha256_of_the_index_that_is_not_one_is_not_proposed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = proposed(project, monkeypatch, Listed("flash_attn-2.8.3.tar.gz", "0}, none: {a: b"))
    assert "none" not in text and "extensions:" not in text and "flash-attn==2.8.3" in text


def test_a_release_for_another_python_is_not_proposed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = Listed("flash_attn-2.9.0.tar.gz", "1" * 64, requires_python=">=3.99")
    text = proposed(project, monkeypatch, Listed("flash_attn-2.8.3.tar.gz", "0" * 64), newer)
    assert "# 2.8.3" in text and "0" * 64 in text and "2.9.0" not in text


def test_all_names_that_the_index_lacks_are_listed_together(project: Path, index: Index) -> None:
    """uv names only the first. Those of an environment.yml are names of conda, which the index may not have."""
    write_profile(project, {**SMALL, "extensions": []})
    (project / "environment.yml").write_text(
        "dependencies:\n  - alpha=1.0\n  - pytorch3d\n  - ocl-icd\n  - pip:\n      - nosuch>=2\n", encoding="utf-8"
    )
    done = envbuild("lock", "sample", "--requirements", "environment.yml")
    assert done.code == 3
    assert "not on the index: nosuch, ocl-icd, pytorch3d\n" in done.stderr
    assert done.stderr.count("not on the index") == 1
    assert "name its Debian package under apt" in done.stderr


def test_an_index_that_does_not_answer_lacks_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(name: str) -> tuple[Listed, ...]:
        if name == "silent":
            raise NetworkError("no answer")
        return ()

    monkeypatch.setattr(index_pages, "listed_files", listed)
    other = "windows-only; sys_platform == 'win32'"
    plan = plan_of(project, {**SMALL, "packages": ["silent", other, *(f"gone{number}" for number in range(30))]})
    text = str(missing_wheel_remedies.remedies(plan, "Because gone1 was not found in the package registry and you"))
    assert text.startswith("not on the index: gone0, gone1, gone10,") and " and 10 more\n" in text
    assert "silent" not in text and "windows" not in text


def test_a_name_that_another_package_requires_is_listed_apart(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of the profile or of a requirements file contains the name."""
    monkeypatch.setattr(index_pages, "listed_files", lambda name: ())
    plan = plan_of(project, {**SMALL, "packages": ["gone"]})
    text = str(missing_wheel_remedies.remedies(plan, "Because lib-dep was not found in the package registry and gone"))
    assert "not on the index: gone\n" in text and "not on the index, required by another package: lib-dep\n" in text
    plan = plan_of(project, {**SMALL, "packages": []})
    for name, expected in (("lib_dep", False), ("torch", True)):
        text = str(missing_wheel_remedies.remedies(plan, f"Because {name} was not found in the package registry"))
        assert ("correct the names" in text) is expected


def test_an_error_about_something_else_gets_no_remedy(project: Path, index: Index) -> None:
    plan = plan_of(project, {**SMALL, "packages": ["flash-attn"]})
    assert missing_wheel_remedies.remedies(plan, "alpha depends on beta<2 and beta>=2 is required") is None


def test_lines_that_belong_to_another_torch_give_way_to_the_profile(project: Path) -> None:
    write_profile(project, {**SMALL, "extensions": []})
    (project / "requirements.txt").write_text(
        "torchvision==0.19.0\ntorchaudio==2.11.0\ntriton==3.0.0\nnvidia-cublas-cu12==12.1.3.1\n"
        "nvidia-nccl-cu13>=2\ntorchvision\n-c bounds.txt\n",
        encoding="utf-8",
    )
    (project / "bounds.txt").write_text("torch==2.3.0\nbeta<2\n", encoding="utf-8")
    loaded = profile_reader_and_overrides.load("sample", None, project / "requirements.txt")
    assert set(loaded.profile.packages) >= {"torchvision", "torchaudio==2.11.0", "nvidia-nccl-cu13>=2"}
    assert not any("triton" in one or "cu12" in one or "0.19" in one for one in loaded.profile.packages)
    assert [note.partition(": ")[0] for note in loaded.notes] == [
        "requirements.txt:1", "requirements.txt:3", "requirements.txt:4", "bounds.txt:1",
    ]  # fmt: skip
    plan = plan_resolver.resolve(loaded)
    assert "beta<2" in plan.constraints and plan.inputs["wheels"] != plan_of(project, SMALL).inputs["wheels"]


def test_cuda_libraries_give_way_to_a_torch_without_gpu_code(project: Path) -> None:
    write_profile(project, {**PROFILE, "torch": "2.13.0+cpu", "gpus": []})
    (project / "requirements.txt").write_text(
        "torch==2.5.1\nnvidia-cublas-cu12==12.4.5.8\nnvidia-nccl-cu12==2.21.5\ntriton==3.1.0\ntorchvision==0.20.1\nbeta\n",
        encoding="utf-8",
    )
    loaded = profile_reader_and_overrides.load("sample", None, project / "requirements.txt")
    added = loaded.profile.packages[len(PROFILE["packages"]) :]
    assert [one.partition("==")[0] for one in added] == ["torchvision", "beta"]
    assert not any("0.20" in one for one in added) and len(loaded.notes) == 5


@pytest.mark.parametrize(
    ("torch", "line", "package"),
    [
        ("2.7.1", "torchaudio", "torchaudio==2.7.*"),
        ("2.7.1", "torchaudio==2.6.0", "torchaudio==2.7.*"),
        ("2.7.1", "torchaudio>=2.1; sys_platform == 'linux'", 'torchaudio==2.7.*,>=2.1; sys_platform == "linux"'),
        ("2.7.1", "torchaudio==2.7.0", "torchaudio==2.7.0"),
        ("2.7.1", "torchvision==0.21.0", "torchvision==0.22.*"),  # otherwise refused as older than the newest release
        ("2.11.0", "torchaudio==2.10.0", "torchaudio>=2.11"),
        ("2.7.1", "torchvision", "torchvision"),  # each release requires its own torch
        ("2.11.0", "torchaudio", "torchaudio"),
    ],
)
def test_torchaudio_belongs_to_the_torch_of_the_profile(project: Path, torch: str, line: str, package: str) -> None:
    """torchaudio 2.11 and newer require no torch, so a resolver would choose them for every torch."""
    write_profile(project, {**SMALL, "torch": torch})
    (project / "requirements.txt").write_text(f"{line}\n", encoding="utf-8")
    loaded = profile_reader_and_overrides.load("sample", None, project / "requirements.txt")
    assert loaded.profile.packages == (package,)


@pytest.mark.parametrize(
    ("pins", "package"),
    [
        ({}, "torchaudio==2.7.*"),
        ({"torch": "2.5.1", "cuda": "12.4"}, "torchaudio==2.5.*"),
        ({"torchaudio": "2.6.0"}, "torchaudio==2.6.0"),
    ],
)
def test_torchaudio_in_a_profile_belongs_to_its_torch(project: Path, pins: dict[str, str], package: str) -> None:
    write_profile(project, {**SMALL, "torch": "2.7.1", "packages": ["torchaudio", "torchvision"]})
    loaded = profile_reader_and_overrides.load("sample", pins)
    assert loaded.profile.packages == (package, "torchvision")
    note = f"profiles/sample.yaml:9: {package} is used, because it belongs to torch {pins.get('torch', '2.7.1')}"
    assert (note in loaded.notes) == ("torchaudio" not in pins)


def test_a_series_of_torchaudio_is_not_an_exact_version(project: Path) -> None:
    write_profile(project, {**SMALL, "torch": "2.7.1", "packages": ["Torchaudio==2.*"]})
    assert profile_reader_and_overrides.load("sample", {}).profile.packages == ("Torchaudio==2.*,==2.7.*",)


def test_an_exact_torchaudio_of_the_command_line_gets_no_bound(project: Path) -> None:
    write_profile(project, {**SMALL, "torch": "2.7.1"})
    (project / "requirements.txt").write_text("torchaudio\n", encoding="utf-8")
    pins = {"torchaudio": "2.11.0"}
    loaded = profile_reader_and_overrides.load("sample", pins, project / "requirements.txt")
    assert not any("2.7" in one for one in loaded.profile.packages)


def test_what_the_profile_compiles_is_not_looked_up_on_the_index(project: Path) -> None:
    built = {"name": "flash-attn", "sdist": {"sha256": "0" * 64}, "modules": ["flash_attn_2_cuda"]}
    write_profile(project, {**SMALL, "extensions": [built]})
    (project / "requirements.txt").write_text("flash_attn>=2.6\nalpha\n", encoding="utf-8")
    loaded = profile_reader_and_overrides.load("sample", None, project / "requirements.txt")
    assert loaded.profile.packages == ("alpha",) and "compiles it from source" in loaded.notes[0]
