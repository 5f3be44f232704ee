"""Targets: profiles, locks, requirement files, a site's facts and settings, and YAML itself."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from hypothesis import strategies as st
from unit.support import PROFILE, lock_for

from envbuild.attest import keys_and_signatures, sbom
from envbuild.facts import fact_file_reader
from envbuild.image import shared_extension_cache
from envbuild.lock import lock_file
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.util import package_data, settings, strict_and_canonical_json, user_folders, yaml_and_project_paths
from envbuild.util.errors import EnvbuildError, FactsError
from envbuild.util.yaml_and_project_paths import Document
from fuzz.renderers import judged
from fuzz.strategies import BYTES, ENCODED, Draw, as_yaml, files, spoiled, trees, yaml_files
from fuzz.target import Target

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden"
RICH: dict[str, Any] = {
    **PROFILE,
    "torch": "2.7.1",
    "gpus": ["a100", "h20"],
    "gpu_count": 4,
    "variant": "devel",
    "toolchain": {"sha256": "a" * 64, "url": "https://mirror.example/cuda.tar"},
    "driver": {"minimum": "470.57.02", "compat": {"sha256": "b" * 64}},
    "cuda": "12.6",
    "features": ["bf16"],
    "pins": {"cublas": "12.6.4.1", "nccl": {"version": "2.26.2", "reason": "why"}},
    "accept": [{"advisory": "nccl-abort-hang", "reason": "a time limit"}],
    "selftest": {
        "level": "full",
        "require": ["env.libs"],
        "transport": "p2p",
        "floor": {"gemm": 0.5},
        "burn_seconds": 5,
        "memory_gb": 4,
        "timeout": 60,
        "shapes": [
            {"m": 2, "k": 4, "n": 8, "dtype": "bf16", "bias": True},
            {"heads": 8, "length": 64, "depth": 64, "dtype": "bf16", "causal": True},
        ],
        "script": "smoke.py",
    },
}
PROFILES = [PROFILE, RICH, {"extends": "parent", "env": {"A": "b"}}]
WRITTEN = [
    file.read_bytes()
    for file in (
        *sorted(GOLDEN.glob("*/profile.yaml")),
        *sorted(GOLDEN.glob("faults/*/profile.yaml")),
        *sorted(package_data.PROFILES.rglob("*.yaml")),
    )
    if not file.name.endswith(".lock.yaml")
]


def _profile(raw: bytes) -> None:
    """An accepted profile renders to exactly what it requests."""
    folder = Path("profiles")
    (folder / "parent.yaml").write_bytes(as_yaml(PROFILE))
    (folder / "smoke.py").write_text("step('one')\n", encoding="utf-8")
    file = folder / "sample.yaml"
    file.write_bytes(raw)
    loaded = profile_reader_and_overrides.load(str(file))
    plan = plan_resolver.resolve(loaded)
    made = lock_for(plan)
    judged(made)
    required = {key: value for key, value in loaded.profile.env.items() if key in made.environment}
    assert required.items() <= made.environment.items()
    lock_file.write(made, folder / "sample.lock.yaml", "sample")
    assert lock_file.read(folder / "sample.lock.yaml") == made


@cache
def lock_seeds() -> list[dict[str, Any]]:
    """Return the shipped and the golden locks, each with only the first two Debian packages of a kind and the first
    four wheels, so that random changes reach all parts."""
    found = []
    for file in (*sorted(GOLDEN.glob("*/lock.yaml")), *sorted(package_data.PROFILES.rglob("*.lock.yaml"))):
        data = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
        content = data["content"]
        for holder, key, most in ((content["base"], "packages", 2), (content, "apt", 2), (content, "wheels", 4)):
            if key in holder:
                holder[key] = holder[key][:most]
        data["id"] = f"sha256:{strict_and_canonical_json.canonical_digest(content)}"
        names = [one["name"] for one in content.get("extensions", ())]
        row = {"key": "0" * 64, "file": "x-1-cp311-cp311-linux_x86_64.whl", "sha256": "1" * 64, "bytes": 1}
        data |= {"compiled": [{"name": name, **row} for name in names]} if names else {}
        found.append(data)
    return found


@st.composite
def _locks(draw: Draw) -> bytes:
    """Draw a lock that was edited by hand; its id is usually computed again."""
    data = draw(trees(lock_seeds()))
    if isinstance(data, dict) and draw(st.integers(0, 9)):
        data["id"] = f"sha256:{_digest(data.get('content'))}"
    return as_yaml(data)


def _digest(content: Any) -> str:
    try:  # the digest of the content as the reader will parse it
        return strict_and_canonical_json.canonical_digest(
            yaml_and_project_paths.parse(as_yaml({"content": content}).decode(), "-").data["content"]
        )
    except (EnvbuildError, ValueError):
        return "0" * 64


def _lock(raw: bytes) -> None:
    file = Path("profiles/sample.lock.yaml")
    file.write_bytes(raw)
    found = lock_file.read(file)
    assert found is not None
    judged(found)
    sbom.make_sbom("sample", found, f"sha256:{'0' * 64}")
    lock_file.write(found, file, "sample")
    assert lock_file.read(file) == found


_LINES = (
    b"-r other.txt\n",
    b"-r requirements.txt\n",
    b"-r \0\n",
    b"-r /dev/zero\n",
    b"-r " + b"x" * 300,
    b"-e .\n",
    b"-\n",
    b"--\n",
    b"-c x",
    b"numpy>=2 \\\n  --hash=sha256:00\n",
    b"a @ file:///x\n",
    b"git+https://x/y",
    b"x; python_version < '3'",
    b"#",
    b"\\",
    b"numpy[a,b]>1,<2",
    b"===x",
    b"a;" + b"(" * 250,
    b"a; " + b"'x' in '" * 20,
    b"torch",
    b"\x0c",
    b"\xc2\xa0",
)
_TOML = (
    b"[project]\n",
    b"dependencies = [",
    b"]",
    b"[" * 5000,
    b"{a=" * 500,
    b"a." * 2000 + b"b = 1\n",
    b"'''",
    b'"""',
    b"1979-05-27",
    b"0x",
    b"1e999",
    b"inf",
    b"[[a]]\n",
    b"[a]\n[a]\n",
    b"\\u0000",
    b"\\ud800",
    b"= 1\n",
    b'"x" = 1\n',
    b"dynamic = [1]\n",
)
_TXT = [b"numpy>=2\neinops==0.8.0 --hash=sha256:00\n# why\n-r other.txt\nscipy ; python_version > '3.8'\n"]
_PYPROJECT = [
    b'[project]\nname = "x"\ndependencies = ["numpy>=2", "einops; python_version>\'3\'"]\n[tool.x]\na = {b = [1]}\n'
]


def _requirements(value: tuple[str, bytes, bytes]) -> None:
    kind, raw, other = value
    folder = Path("project")
    folder.mkdir(exist_ok=True)
    (folder / "other.txt").write_bytes(other)
    file = folder / kind
    file.write_bytes(raw)
    Path("profiles/sample.yaml").write_bytes(as_yaml(PROFILE))
    judged(lock_for(plan_resolver.resolve(profile_reader_and_overrides.load("profiles/sample.yaml", wanted=file))))


_REQUIREMENTS = st.one_of(
    st.tuples(st.just("requirements.txt"), files(_TXT, (*_LINES, *ENCODED)), files(_TXT, _LINES)),
    st.tuples(st.just("pyproject.toml"), files(_PYPROJECT, (*_TOML, *_LINES, *ENCODED)), st.just(b"")),
)


@cache
def _shipped(name: str) -> Document:
    """Return only some of the facts, because the campaign reads the facts thousands of times."""
    found = yaml_and_project_paths.read(fact_file_reader._FOLDER / f"{name}.yaml", FactsError)
    for key, most in (("gpus", 3), ("advisories", 4)):
        if key in found.data:
            found.data[key] = [{**row, "shows": {}} if "shows" in row else row for row in found.data[key][:most]]
            for row in found.data[key] if key == "advisories" else ():
                for match in [row["match"]] if isinstance(row["match"], dict) else row["match"]:
                    match.pop("gpus", None)
    return found


@cache
def _fact_seeds() -> list[dict[str, Any]]:
    found = []
    for name, key in (("gpus", "gpus"), ("advisories", "advisories")):
        doc = yaml_and_project_paths.read(fact_file_reader._FOLDER / f"{name}.yaml", FactsError)
        for row in doc.data[key][4:40:3]:
            made = {**copy.deepcopy(row), "id": "own-row"}
            if key == "gpus":
                made["names"] = ["NVIDIA Own"]
                made.pop("unconfirmed_names", None)
            found.append({"as_of": "2026-11", "sources": {"own": "https://x.example/y"}, key: [made]})
    return found


def _facts(raw: bytes) -> None:
    file = Path("own.yaml")
    file.write_bytes(raw)
    fact_file_reader._extensible.cache_clear()
    try:
        with mock.patch.object(fact_file_reader, "read", _shipped):
            fact_file_reader._extensible((file,))
    finally:
        fact_file_reader._extensible.cache_clear()


_SETTINGS = [
    {"debian_mirror": "https://mirror.example/debian", "public_key": "~/team.pub", "signing_key": "~/team.key"},
    {"extensions": {"cache": "/shared/extensions"}},
    {"extensions": {"cache": "registry.example/team/extensions"}},
]


def _settings(raw: bytes) -> None:
    file = user_folders.config_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(raw)
    settings.settings_document.cache_clear()
    try:
        settings.setting("debian_mirror")
        shared_extension_cache.configured_cache()
        keys_and_signatures.trusted()
        keys_and_signatures.configured_signer()
    finally:
        settings.settings_document.cache_clear()
        file.unlink()


def _yaml(raw: bytes) -> None:
    """Positions and merging must work for everything that is accepted."""
    file = Path("any.yaml")
    file.write_bytes(raw)
    found = yaml_and_project_paths.read(file)
    merged = yaml_and_project_paths.merge(found, found)
    assert repr(merged.data) == repr(found.data)  # NaN is not equal to itself
    for path in found.places:
        assert found.place(path).line >= 1
        yaml_and_project_paths.field_name(path)


TARGETS = (
    Target("profile", st.one_of(yaml_files(PROFILES, WRITTEN), spoiled(st.sampled_from(WRITTEN), BYTES)), _profile, 9),
    Target("lock", st.one_of(_locks(), _locks(), yaml_files(lock_seeds())), _lock, 9),
    Target("requirements", _REQUIREMENTS, _requirements, 9),
    Target("facts", yaml_files(_fact_seeds()), _facts, 9),
    Target("settings", yaml_files(_SETTINGS), _settings, 68),
    Target("yaml", st.one_of(yaml_files([PROFILE, RICH], WRITTEN), st.binary(max_size=200)), _yaml, 68),
)
