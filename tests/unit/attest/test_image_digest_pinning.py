from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from envbuild.attest import image_digest_pinning
from envbuild.registry import oci_types
from envbuild.util.errors import FileError, NetworkError, OutOfDate, UsageError
from unit.registries import Registry, serving
from unit.support import PROFILE, configure, envbuild, sha, write_profile

DIGEST, OLD = f"sha256:{sha('now')}", f"sha256:{sha('then')}"


@pytest.mark.parametrize(
    "text",
    [
        "FROM registry.example/h20:verified\n",
        "FROM --platform=linux/amd64 registry.example:5000/a/b/h20:verified AS base\n",
        'image: "registry.example/h20:verified"\n',
        "image: localhost/h20:verified # comment\n",
        "image: box:5000/h20:verified",
        f"FROM registry.example/h20:verified@{OLD} AS x\n",
    ],
)
def test_references_are_pinned_and_nothing_else_changes(text: str) -> None:
    after, (pin,) = image_digest_pinning.pinned(text, lambda image: DIGEST)
    assert after == text.replace(f"@{OLD}", "").replace(":verified", f":verified@{DIGEST}")
    assert pin.before == (OLD if OLD in text else None)
    again, (pin,) = image_digest_pinning.pinned(after, lambda image: DIGEST)
    assert (again, pin.current) == (after, True)


@pytest.mark.parametrize(
    "text",
    ["FROM envbuild/h20:verified\n", "FROM h20:verified\n", "FROM registry.example/h20:verified-2\n",
     "FROM registry.example/h20:latest\n", "see http://registry.example/h20:verified\n", "unverified:verified"],
)  # fmt: skip
def test_an_image_without_a_verified_tag_is_left_unchanged(text: str) -> None:
    assert image_digest_pinning.pinned(text, lambda image: DIGEST) == (text, [])


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving(Registry()) as found:
        yield found


def test_pin_writes_and_check_reports(registry: Registry, project: Path) -> None:
    digest = registry.put(oci_types.MANIFEST, {"mediaType": oci_types.MANIFEST}, "verified")
    image = f"{registry.host}/team/h20:verified"
    Path("Dockerfile").write_text(f"# a comment\nFROM {image}\nRUN pip install einops\n", encoding="utf-8")
    result = envbuild("pin-digests", "--check", "Dockerfile", "--json")
    assert (result.code, result.document["error"]["faults"][0]["line"]) == (OutOfDate.code, 2)
    assert envbuild("pin-digests", "Dockerfile").code == 0
    assert Path("Dockerfile").read_text(encoding="utf-8").splitlines()[1] == f"FROM {image}@{digest}"
    assert envbuild("pin-digests", "--check", "Dockerfile").code == 0
    registry.put(oci_types.MANIFEST, {"mediaType": oci_types.MANIFEST, "annotations": {"a": "b"}}, "verified")
    from envbuild.cli import pin_digests

    pin_digests._digest.cache_clear()
    assert envbuild("pin-digests", "--check", "Dockerfile").code == OutOfDate.code


def test_pin_says_what_it_cannot_do(registry: Registry, project: Path) -> None:
    Path("a").write_text("FROM scratch\n", encoding="utf-8")
    assert envbuild("pin-digests", "a").code == UsageError.code
    assert envbuild("pin-digests", "nowhere").code == FileError.code
    Path("a").write_text(f"FROM {registry.host}/gone:verified\n", encoding="utf-8")
    assert envbuild("pin-digests", "a").code == NetworkError.code


COMMIT = f"git+https://git.example/team/envbuild@{'0' * 40}"
WHEEL = f"wheels/envbuild-0.1.0-py3-none-any.whl#sha256={'1' * 64}"
IMAGE = "registry.example:5000/team/sample"


def ci(system: str, *arguments: str, name: str = "sample") -> tuple[str, dict[str, Any]]:
    """Run `export ci`. Return what it prints, and the jobs in that text."""
    result = envbuild("export", "ci", system, name, "--image", IMAGE, *arguments)
    assert result.code == 0, result.stderr
    found = yaml.safe_load(result.stdout)
    return result.stdout, found.get("jobs", found)


@pytest.mark.parametrize("system", ["github", "gitlab"])
def test_a_ci_job_verifies_and_then_uses_the_digest(project: Path, system: str) -> None:
    write_profile(project, PROFILE)
    configure(f"ci_install: {COMMIT}\n")
    text, jobs = ci(system)
    assert f"verify {IMAGE}:verified --profile sample --policy policy.yaml" in str(jobs["verify"])
    assert f"pip install '{COMMIT}'" in text
    assert "pip install envbuild" not in text
    image = jobs["use"].get("container", jobs["use"])["image"]
    assert image in (f"{IMAGE}@$DIGEST", f"{IMAGE}@${{{{ needs.verify.outputs.digest }}}}")
    assert "needs" in jobs["use"]
    assert "#   gpus: [cpu]" in text and "gpus all" not in text


def test_the_job_of_github_logs_in_before_it_verifies(project: Path) -> None:
    _, jobs = ci("github", "--install", COMMIT, name="h20")
    steps = [step.get("name") or step.get("id") for step in jobs["verify"]["steps"]]
    assert steps == [None, "log in", "install", "verify"]
    assert "docker login registry.example:5000 " in jobs["verify"]["steps"][1]["run"]
    container = jobs["use"]["container"]
    assert container["options"] == "--gpus all"
    assert set(container["credentials"]) == {"username", "password"}
    assert jobs["use"]["runs-on"] == "gpu"


def test_the_job_of_gitlab_logs_in_before_it_verifies(project: Path) -> None:
    _, jobs = ci("gitlab", "--install", COMMIT, name="h20")
    script = jobs["verify"]["script"]
    assert "DOCKER_AUTH_CONFIG" in script[0] and "pip install" in script[1] and " verify " in script[2]
    assert jobs["use"]["tags"] == ["gpu"]


@pytest.mark.parametrize("system", ["github", "gitlab"])
def test_a_wheel_in_the_repository_is_checked_before_it_is_installed(project: Path, system: str) -> None:
    text, jobs = ci(system, "--install", WHEEL, name="h20")
    path = "./wheels/envbuild-0.1.0-py3-none-any.whl"
    lines = [line.strip() for line in text.splitlines()]
    at = lines.index(f"echo '{'1' * 64}  {path}' | sha256sum -c -")
    assert lines[at + 1] == f".envbuild/bin/pip install '{path}'"
    assert jobs["use"]


def test_a_ci_job_takes_a_repository_alone(project: Path) -> None:
    write_profile(project, PROFILE)
    result = envbuild("export", "ci", "github", "sample", "--image", "r.example/a:tag", "--install", COMMIT)
    assert result.code == UsageError.code and "has a tag" in result.stderr
