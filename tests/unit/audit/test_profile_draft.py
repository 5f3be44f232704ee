"""A profile that is drafted from an image can be loaded, has the image's pins, and lists the contents of the image that
it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envbuild.audit import profile_draft
from envbuild.audit.collected_environment import Holdings
from envbuild.cli import audit
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.resolve.plan_resolver import Plan
from envbuild.util.errors import CheckFailed
from unit.support import envbuild

# the requirements of torch 2.3.1 that this test needs
TORCH_NEEDS = ["nvidia-cublas-cu12 (==12.1.3.1) ; platform_system == 'Linux'", "nvidia-nccl-cu12==2.20.5", "sympy"]
USUAL = {
    "torch": ("2.3.1", TORCH_NEEDS), "nvidia-cublas-cu12": ("12.1.3.1", []), "nvidia-nccl-cu12": ("2.20.5", []),
    "sympy": ("1.13", ["mpmath"]), "mpmath": ("1.3.0", []), "numpy": ("1.26.4", []), "pip": ("26.0", []),
}  # fmt: skip


def held(
    *, python: str = "3.11.2", cuda: str | None = "12.1", imported: bool = True, libraries: tuple[Any, ...] = (),
    others: Mapping[str, tuple[str, list[str]]] | None = None, **changed: tuple[str, list[str]] | None,
) -> Holdings:  # fmt: skip
    """Return the contents of the usual image, with some distributions (underscores for dashes) changed, added, or
    removed."""
    known = {**USUAL, **{name.replace("_", "-"): value for name, value in changed.items()}, **(others or {})}
    installed = {name: value for name, value in known.items() if value}
    torch: dict[str, Any] = {
        "version": "2.3.1+cu121", "cuda": cuda, "hip": None, "path": None, "imported": imported, "architectures": [],
        "failure": None,
    }  # fmt: skip
    return Holdings.model_validate(
        {
            "python": {
                "version": python,
                "executable": "/usr/bin/python3",
                "prefix": "/usr",
                "markers": {"platform_system": "Linux", "python_version": "3.11"},
            },
            "distributions": [
                {"name": name, "version": version, "folder": "/site", "requires": requires}
                for name, (version, requires) in installed.items()
            ],
            "torch": torch if "torch" in installed else None,
            "libraries": list(libraries),
            "order": None,
            "apex": None,
            "variables": {},
            "compat": [],
            "machine": {"gpus": [], "driver": None},
            "cut": False,
            "seconds": {},
        }
    )


def written(project: Path, holdings: Holdings) -> tuple[str, LoadedProfile, Plan]:
    """Return the text, and the profile that envbuild reads from it."""
    text = profile_draft.draft_profile("mine", "an/image:tag", holdings)
    (project / "profiles" / "mine.yaml").write_text(text, encoding="utf-8")
    loaded = profile_reader_and_overrides.load("mine")
    return text, loaded, plan_resolver.resolve(loaded)


def test_the_usual_image(project: Path) -> None:
    text, loaded, plan = written(project, held())
    profile = loaded.profile
    assert (profile.torch, profile.cuda, profile.python) == ("2.3.1", "12.1", "3.11")
    assert plan.suite == "bookworm"
    assert profile.packages == ("numpy==1.26.4",)
    assert profile.pins == {} and profile.gpus == ()
    assert text.splitlines()[0] == "# The contents of an/image:tag."
    assert envbuild("show", "mine").code == 0


def test_a_recorded_image(project: Path) -> None:
    """The output of the collector in the image of step-video gives its own profile, except for GPUs and constraints."""
    text = (Path(__file__).parent / "recorded" / "step-video.json").read_text(encoding="utf-8")
    _, loaded, plan = written(project, Holdings.model_validate_json(text))
    profile = loaded.profile
    assert (profile.torch, profile.cuda, profile.python, plan.suite) == ("2.3.1", "12.1", "3.11", "bookworm")
    assert {name: pin.version for name, pin in profile.pins.items()} == {"cublas": "12.5.2.13"}
    assert profile.packages == ("numpy==1.26.4",)


def test_a_library_that_differs_from_torchs_own_is_pinned_with_the_reason(project: Path) -> None:
    changed = held(nvidia_cublas_cu12=("12.5.2.13", []))
    _, loaded, plan = written(project, changed)
    pin = loaded.profile.pins["cublas"]
    assert (pin.version, pin.reason) == ("12.5.2.13", "as in the image; torch 2.3.1 requires ==12.1.3.1")
    assert list(loaded.profile.pins) == ["cublas"]
    assert plan.overrides == ("nvidia-cublas-cu12==12.5.2.13",)


def test_packages_required_by_others_are_not_listed(project: Path) -> None:
    """flask requires click; of two packages that require each other, one is listed; a package that only an extra
    requires is listed, unless the extra is requested."""
    changed = held(
        flask=("3.0", ["click>=8", "idle; extra == 'no'"]), click=("8.1", []), idle=("1.0", []),
        one=("1.0", ["other"]), other=("1.0", ["one"]),
    )  # fmt: skip
    _, loaded, _ = written(project, changed)
    assert loaded.profile.packages == ("flask==3.0", "idle==1.0", "numpy==1.26.4", "one==1.0")


def test_packages_that_cannot_be_requested_are_in_a_comment(project: Path) -> None:
    changed = held(
        apex=("0.1", []), flash_attn=("2.6.3+cu123", []), broken=("unknown", []),
        nvidia_cublas_cu11=("11.10.3.66", []), torchvision=("0.18.1+cu121", ["torch"]),
    )  # fmt: skip
    text, loaded, _ = written(project, changed)
    assert loaded.profile.packages == ("numpy==1.26.4",)
    for name, word in {
        "apex==0.1": "unrelated package",
        "flash-attn==2.6.3+cu123": "a local build (+cu123)",
        "broken==unknown": "the name or version is not valid",
        "nvidia-cublas-cu11==11.10.3.66": "CUDA library",
        "torchvision==0.18.1+cu121": "local build",
    }.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"# {name}")]
        assert word in line


def test_a_local_build_of_torch_takes_its_kin_along(project: Path) -> None:
    changed = held(torch=("2.5.0+cu121", TORCH_NEEDS), torchvision=("0.20.0+cu121", ["torch"]))
    text, loaded, _ = written(project, changed)
    assert loaded.profile.torch == "2.5.0+cu121"
    assert "torchvision==0.20.0+cu121" in loaded.profile.packages
    assert (
        "envbuild's facts do not contain torch 2.5.0+cu121, so these are not pinned: cublas 12.1.3.1, nccl 2.20.5"
        in text
    )


@pytest.mark.parametrize(
    ("python", "torch", "suite"),
    [("3.9.2", "2.3.1", "bullseye"), ("3.10.12", "2.3.1", "bullseye"), ("3.12.1", "2.3.1", "bookworm"),
     ("3.13.5", "2.7.1", "trixie"), ("3.12.1", "2.7.1", "bookworm")],
)  # fmt: skip
def test_a_python_that_no_suite_has_is_reported(project: Path, python: str, torch: str, suite: str) -> None:
    text, _, plan = written(project, held(python=python, torch=(torch, []), cuda=None))
    assert plan.suite == suite
    assert ("# The image has Python" in text) == (not python.startswith(f"{plan.python}."))


def test_a_torch_that_cannot_be_imported_says_nothing_of_cuda(project: Path) -> None:
    text, loaded, _ = written(project, held(imported=False, cuda=None))
    assert loaded.profile.cuda is None
    assert "torch could not be imported" in text


def test_a_loaded_library_without_a_distribution_is_reported(project: Path) -> None:
    copy: dict[str, Any] = {
        "library": "cublas", "name": "libcublas.so.12", "path": "/usr/local/cuda/lib64/libcublas.so.12",
        "version": None, "reported": "12.3.4", "sha256": None, "owner": "unowned", "record": None, "loaded": True,
        "ways": [],
    }  # fmt: skip
    text, loaded, _ = written(project, held(libraries=(copy,)))
    assert "not part of a distribution, so not pinned: /usr/local/cuda/lib64/libcublas.so.12" in text
    assert loaded.profile.pins == {}


def test_without_torch_no_profile_is_written() -> None:
    with pytest.raises(CheckFailed, match="an/image:tag has no torch"):
        profile_draft.draft_profile("mine", "an/image:tag", held(torch=None))


@pytest.mark.parametrize("odd", ['x"]', "a: b", "# x", "{}", "'", "\\", "- y", "&a", "%TAG"])
def test_names_and_versions_from_an_image_cannot_inject_yaml(project: Path, odd: str) -> None:
    """An invalid name or version is written into a comment. A line break cannot occur, because the reader of the
    document refuses it."""
    _, loaded, _ = written(project, held(others={odd: ("1.0", []), "other": (odd, [])}))
    assert loaded.profile.packages == ("numpy==1.26.4",)
    assert set(loaded.document.data) == {"description", "base", "python", "torch", "cuda", "packages"}


def test_new_takes_a_profile_or_an_image(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/docker.sock")
    assert envbuild("init", "mine").code == 2
    assert envbuild("init", "mine", "--from", "h20", "--from-image", "x").code == 2
    assert envbuild("init", "mine", "--from-image", "x").code == 6
    assert not (project / "profiles" / "mine.yaml").exists()
    assert envbuild("init", "mine", "--from", "h20").code == 0
    assert envbuild("init", "mine", "--from-image", "x").code == 2  # it exists already
    own = envbuild("init", "a100", "--from", "h20")
    assert own.code == 0 and "profiles/a100.yaml takes precedence over the shipped profile a100" in own.stderr


@pytest.mark.parametrize("other", [["--from", "cpu"], ["--from-image", "x"]])
def test_init_takes_one_source(project: Path, other: list[str]) -> None:
    done = envbuild("init", "mine", "--from-env", ".venv", *other)
    assert (done.code, "give one of --from PROFILE" in done.stderr) == (2, True)


def test_init_writes_what_an_environment_holds(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "odd\nfolder\x85torch: 1"
    monkeypatch.setattr(audit, "collect_from_environment", lambda python: (Path(folder), held()))
    done = envbuild("init", "mine", "--from-env", folder)
    assert (done.code, done.stdout) == (0, "profiles/mine.yaml; next: envbuild show mine\n")
    text = (project / "profiles" / "mine.yaml").read_text(encoding="utf-8")
    assert text.startswith("# The contents of odd?folder\N{REPLACEMENT CHARACTER}torch: 1.\n")
    assert "Not determined from the environment" in text
    assert profile_reader_and_overrides.load("mine").profile.torch == "2.3.1"


def test_a_path_that_is_not_an_interpreter_is_named(project: Path) -> None:
    done = envbuild("init", "mine", "--from-env", "nosuch")
    assert (done.code, "nosuch" in done.stderr) == (2, True), done.stderr
    assert not (project / "profiles").exists() or not list((project / "profiles").iterdir())
