"""Foreign profiles, requirements files and locks must not read or print other files of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from unit.support import PROFILE, CommandResult, as_yaml, envbuild, lock_for, plan_of, profile_of, write_profile

from envbuild.fetch import archive_fetcher, sha256_file_store
from envbuild.lock import lock_file
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.util import package_data
from envbuild.util.errors import FileError, HashMismatch

STRANGER = "author of a profile or requirements file"
SECRETS = {
    "passwd": "root:hunter2hash:0:0:root:/root:/bin/bash\n",
    "netrc": "machine index.example login me password hunter2word\n",
    "token": "hunter2token\n",  # a valid requirement, too
    "key.yaml": "-----BEGIN PRIVATE KEY-----\nhunter2key\n-----END PRIVATE KEY-----\n",
    "values.yaml": "hunter2name: hunter2value\ntorch: hunter2version\npython: [hunter2list]\nenv: hunter2env\n",
}
TRACE = "hunter2"


@pytest.fixture
def outside(project: Path) -> Path:
    """A folder of secrets next to the project."""
    folder = project.parent / "home"
    folder.mkdir()
    for name, text in SECRETS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def refused(project: Path, *arguments: str) -> str:
    """Run a command that must fail and return its error; checks that no part of a secret is shown or written, and that
    nothing was locked."""
    text, document = envbuild(*arguments), envbuild(*arguments, "--json")
    shown = "".join((text.stdout, text.stderr, document.stdout, document.stderr))
    assert TRACE not in shown
    assert (text.code, document.code) == (3, 3), text.stderr
    for file in project.rglob("*"):
        if file.is_file() and not file.is_symlink():
            assert TRACE not in file.read_text(encoding="utf-8"), file
    return text.stderr


def written(project: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text, encoding="utf-8")


REFUSED = "the file is not opened; the error names the line"


@pytest.mark.attack(STRANGER, "-r of a file outside the project", REFUSED)
@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("line", ["-r ../home/{}", "--requirement=../home/{}", "-r {home}/{}", "-r sub/../../home/{}"])
def test_an_include_outside_the_project(project: Path, outside: Path, secret: str, line: str) -> None:
    written(project, {"requirements.txt": f"numpy\n{line.format(secret, home=outside)}\n"})
    result = refused(project, "lock", "cpu", "--requirements", "requirements.txt")
    assert f"requirements.txt:2: {line.format(secret, home=outside).split()[-1].rpartition('=')[2]} leads out" in result


@pytest.mark.attack(STRANGER, "-r of a file outside the project, from a file that is included itself", REFUSED)
def test_a_nested_include_outside_the_project(project: Path, outside: Path) -> None:
    written(project, {"requirements.txt": "-r sub/more.txt\n", "sub/more.txt": "-r ../../home/token\n"})
    result = refused(project, "lock", "cpu", "--requirements", "requirements.txt")
    assert "sub/more.txt:1: ../../home/token leads out of the project's folder" in result


@pytest.mark.attack(STRANGER, "-c of a file outside the project", REFUSED)
def test_a_constraint_outside_the_project(project: Path, outside: Path) -> None:
    written(project, {"requirements.txt": "numpy\n-c ../home/token\n"})
    result = refused(project, "lock", "cpu", "--requirements", "requirements.txt")
    assert "requirements.txt:2: ../home/token leads out of the project's folder" in result


@pytest.mark.attack(STRANGER, "-r of a link in the project to a file outside", REFUSED)
@pytest.mark.parametrize("secret", SECRETS)
def test_an_include_of_a_link(project: Path, outside: Path, secret: str) -> None:
    (project / "base.txt").symlink_to(outside / secret)
    written(project, {"requirements.txt": "-r base.txt\n"})
    assert "base.txt leads out" in refused(project, "lock", "cpu", "--requirements", "requirements.txt")


@pytest.mark.attack(STRANGER, "extends: of a file outside the project", REFUSED)
@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("path", ["../../home/{}", "{home}/{}", "./../profiles/../../home/{}"])
def test_a_parent_outside_the_project(project: Path, outside: Path, secret: str, path: str) -> None:
    write_profile(project, {"extends": path.format(secret, home=outside)})
    result = refused(project, "show", "sample")
    assert "profiles/sample.yaml:2: extends: " in result and "leads out of the project's folder" in result


@pytest.mark.attack(STRANGER, "a link among the profiles to a file outside, named by extends:", REFUSED)
@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("parent", ["linked", "./linked.yaml"])
def test_a_parent_that_is_a_link(project: Path, outside: Path, secret: str, parent: str) -> None:
    (project / "profiles" / "linked.yaml").symlink_to(outside / secret)
    write_profile(project, {"extends": parent})
    assert "linked.yaml leads out of the project's folder" in refused(project, "show", "sample")


@pytest.mark.attack(STRANGER, "a link among the profiles to a file outside, read for a list of all", REFUSED)
@pytest.mark.parametrize("secret", SECRETS)
def test_a_profile_that_is_a_link(project: Path, outside: Path, secret: str) -> None:
    (project / "profiles" / "linked.yaml").symlink_to(outside / secret)
    refused(project, "show", "linked")
    for listing in (envbuild("show"), envbuild("show", "--json")):
        assert listing.code == 0 and TRACE not in listing.stdout + listing.stderr
        assert "linked.yaml leads out of the project's folder" in listing.stdout


@pytest.mark.attack(STRANGER, "a lock that is a link to a file outside the project", REFUSED)
@pytest.mark.parametrize("secret", SECRETS)
def test_a_lock_that_is_a_link(project: Path, outside: Path, secret: str) -> None:
    write_profile(project, PROFILE)
    (project / "profiles" / "sample.lock.yaml").symlink_to(outside / secret)
    assert "sample.lock.yaml leads out of the project's folder" in refused(project, "show", "sample")


@pytest.mark.attack("author of a lock", "names a profile or requirements outside the project as what it is of", REFUSED)
@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("key", ["profile", "requirements"])
def test_a_lock_that_names_a_file_outside(project: Path, outside: Path, secret: str, key: str) -> None:
    write_profile(project, PROFILE)
    of = {"profile": "sample", "requirements": "../requirements.txt", key: f"../../home/{secret}"}
    written(project, {"requirements.txt": "numpy\n", "profiles/other.lock.yaml": as_yaml({"of": of})})
    assert "leads out of the project's folder" in refused(project, "show", "other")


@pytest.mark.attack("author of a lock", "a link called requirements.txt to a file outside the project", REFUSED)
def test_a_lock_that_names_a_link(project: Path, outside: Path) -> None:
    write_profile(project, PROFILE)
    (project / "requirements.txt").symlink_to(outside / "token")
    of = {"profile": "sample", "requirements": "../requirements.txt"}
    written(project, {"profiles/other.lock.yaml": as_yaml({"of": of})})
    assert "leads out of the project's folder" in refused(project, "show", "other")


UNQUOTED = "the error names file and line, without the text"
LEAKING = {
    "passwd": (SECRETS["passwd"], ":1: this line is not a requirement"),
    "netrc": (SECRETS["netrc"], ":1: this line is not a requirement"),
    "key": (SECRETS["key.yaml"], ":1: this option is not supported in this file"),
    "address": ("numpy\npackage @ https://me:hunter2@index.example/a.whl\n", ":2: a URL cannot be locked"),
    "long": (f"numpy>={TRACE}{'a' * 300}\n", ":1: this line is not a requirement"),
    "longer": (f"{TRACE}{'a' * 300}\n", ":1: this line is too long"),
    "tab": (f"{TRACE}\t>=1\n", ":1: this line is too long, or has control characters"),
    "option": (f"--password={TRACE}\n--{TRACE}\n", ":2: this option is not supported in this file"),
    "include": (f"-r {TRACE}.txt\n", ":1: the included file cannot be read, or is outside the project"),
    "include of another folder": (f"-r ../{TRACE}/a.txt\n", ":1: the included file cannot be read, or is outside"),
}
TOML = {
    "a key twice": (f"[{TRACE}]\n[{TRACE}]\n", "invalid TOML at line 2, column"),
    "no TOML": (f"{TRACE}:{TRACE}\n", "invalid TOML at line 1, column"),
    "a dependency": (f'[project]\ndependencies = ["{TRACE} {TRACE}"]\n', ":2: this line is not a requirement"),
}


@pytest.mark.attack("user's own mistake", "--requirements of an invalid file outside the project", UNQUOTED)
@pytest.mark.parametrize("case", LEAKING)
@pytest.mark.parametrize("way", ["relative", "absolute", "link"])
def test_a_file_outside_on_the_command_line_is_not_quoted(project: Path, outside: Path, case: str, way: str) -> None:
    write_profile(project, PROFILE)
    (outside / "secret").write_text(LEAKING[case][0], encoding="utf-8")
    (project / "linked").symlink_to(outside / "secret")
    file = {"relative": "../home/secret", "absolute": str(outside / "secret"), "link": "linked"}[way]
    assert f"{file}{LEAKING[case][1]}" in refused(project, "lock", "sample", "--requirements", file)


@pytest.mark.attack("user's own mistake", "--requirements of an invalid .toml file outside the project", UNQUOTED)
@pytest.mark.parametrize("case", TOML)
def test_a_toml_file_outside_on_the_command_line_is_not_quoted(project: Path, outside: Path, case: str) -> None:
    write_profile(project, PROFILE)
    (outside / "secret.toml").write_text(TOML[case][0], encoding="utf-8")
    assert TOML[case][1] in refused(project, "lock", "sample", "--requirements", "../home/secret.toml")


SCRIPTS = {
    "setup.py": (
        (f"{TRACE} {TRACE}\n", "cannot be read as a file of its kind"),
        (f"setup(install_requires={TRACE})\n", ":1: this entry: 0 assignments give the list its value"),
        (f"setup(install_requires=['numpy', '{TRACE} {TRACE}'])\n", ":1: this line is not a requirement"),
    ),
    "env.sh": (
        (f"pip install {TRACE}/{TRACE}\n", ":1: this line is not a requirement"),
        (f"pip install numpy --{TRACE}={TRACE}\n", ":1: this option is not supported in this file"),
        (f"export TOKEN={TRACE}\n", "cannot be read as a file of its kind"),
        (f"{TRACE} 1\npip install ${TRACE}\n", ":2: this entry: it contains a variable"),
    ),
}


@pytest.mark.attack("user's own mistake", "--requirements of a script outside the project, or a lock with it", UNQUOTED)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_outside_is_not_quoted(project: Path, outside: Path, name: str) -> None:
    write_profile(project, PROFILE)
    written(
        project,
        {"profiles/other.lock.yaml": as_yaml({"of": {"profile": "sample", "requirements": f"../../home/{name}"}})},
    )
    for text, expected in SCRIPTS[name]:
        (outside / name).write_text(text, encoding="utf-8")
        assert expected in refused(project, "lock", "sample", "--requirements", f"../home/{name}")
        assert expected in refused(project, "show", "other")


@pytest.mark.attack(STRANGER, "a setup.py or shell script that writes a file when it runs", "it is read, and never run")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("setup.py", "open('ran', 'w')\nsetup(install_requires=['numpy', open('ran', 'w').name])\n"),
        ("env.sh", "touch ran\npip install `touch ran` $(touch ran) numpy; touch ran\n"),
    ],
)
def test_a_script_is_never_run(project: Path, name: str, text: str) -> None:
    write_profile(project, PROFILE)
    written(project, {name: text})
    refused(project, "lock", "sample", "--requirements", name)
    assert not (project / "ran").exists()


@pytest.mark.attack("user's own mistake", "a line of a file outside the project contradicts the profile", UNQUOTED)
def test_a_line_of_a_file_outside_that_is_left_out_is_not_quoted(project: Path, outside: Path) -> None:
    write_profile(project, PROFILE)
    (outside / "secret").write_text(f"torch[{TRACE}]==2.11.0\n", encoding="utf-8")
    (note,) = profile_reader_and_overrides.load("sample", {}, Path("../home/secret")).notes
    assert note.startswith("../home/secret:1: this line is left out: the profile has torch 2.13.0+cpu")


@pytest.mark.attack("author of a lock", "names a file outside that is called as a requirements file", UNQUOTED)
@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.in", "pyproject.toml"])
@pytest.mark.parametrize("command", ["show", "lock"])
def test_a_lock_that_names_a_requirements_file_outside(project: Path, outside: Path, name: str, command: str) -> None:
    write_profile(project, PROFILE)
    for text, expected in TOML.values() if name.endswith(".toml") else LEAKING.values():
        (outside / name).write_text(text, encoding="utf-8")
        of = {"profile": "sample", "requirements": f"../../home/{name}"}
        written(project, {"profiles/other.lock.yaml": as_yaml({"of": of})})
        assert expected in refused(project, command, "other")


@pytest.mark.legitimate("user", "an invalid line in a requirements file of the project", "the error quotes it")
@pytest.mark.parametrize("folder", [".", "app", "profiles"])
def test_a_line_of_a_file_of_the_project_is_quoted(project: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    write_profile(project, PROFILE)
    written(project, {f"{folder}/requirements.txt": "numpy\nnumpy 2.4\n-r nosuch.txt\n--config-settings=a=b\n"})
    if folder == "profiles":
        monkeypatch.chdir(project / folder)
    file = "requirements.txt" if folder == "profiles" else f"{folder}/requirements.txt"
    done = envbuild("lock", "sample.yaml" if folder == "profiles" else "sample", "--requirements", file)
    assert done.code == 3
    for text in (
        "'numpy 2.4' is not a requirement (as in",
        "nosuch.txt cannot be read",
        "option --config-settings is not supported",
    ):
        assert text in done.stderr


WRITES = "links out of the project where envbuild writes"


@pytest.mark.attack(STRANGER, WRITES, "refused; the file outside is unchanged")
@pytest.mark.parametrize("link", ["dockerfiles", "dockerfiles/sample.Dockerfile"])
def test_a_dockerfile_that_leads_out_is_not_written(project: Path, tmp_path: Path, link: str) -> None:
    loaded = profile_of(project, PROFILE)
    lock_file.write(lock_for(plan_of(project, PROFILE)), loaded.lock_file, "sample")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "sample.Dockerfile").write_text("precious", encoding="utf-8")
    (project / link).parent.mkdir(exist_ok=True)
    (project / link).symlink_to(outside / "sample.Dockerfile" if link.endswith("Dockerfile") else outside)
    assert "leads out of the project's folder" in refused(project, "lock", "sample")
    assert (outside / "sample.Dockerfile").read_text(encoding="utf-8") == "precious"


@pytest.mark.attack(STRANGER, WRITES, "refused; no file appears outside")
def test_a_new_profile_and_a_lock_are_not_written_outside(project: Path, tmp_path: Path) -> None:
    for name in ("mine.yaml", "sample.lock.yaml"):
        (project / "profiles" / name).symlink_to(tmp_path / name)
    assert "leads out of the project's folder" in refused(project, "init", "mine", "--from", "cpu")
    with pytest.raises(FileError, match="leads out of the project's folder"):
        lock_file.write(lock_for(plan_of(project, PROFILE)), project / "profiles" / "sample.lock.yaml", "sample")
    assert not (tmp_path / "mine.yaml").exists() and not (tmp_path / "sample.lock.yaml").exists()


@pytest.mark.attack(STRANGER, "an archive with a file: address and a guessed sha256", "the error has no sha256 of it")
def test_an_archive_of_this_machine(project: Path, outside: Path) -> None:
    address = (outside / "token").as_uri()
    compat = {"sha256": "0" * 64, "url": address}
    write_profile(project, {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "driver": {"compat": compat}})
    plan = plan_resolver.resolve(profile_reader_and_overrides.load("sample"))
    with pytest.raises(HashMismatch) as caught:
        archive_fetcher.inspect_archive(plan.archives[0], lambda name, size: None)
    assert sha256_file_store.file_digest(outside / "token") not in caught.value.message + str(caught.value.hint)


WITHOUT_END = "the file is refused, without waiting for it or reading it to its end"


def ended(project: Path, *arguments: str) -> CommandResult:
    """Run a command in a separate process, so that a test can end the command while the command waits."""
    argv = [sys.executable, "-m", "envbuild", *arguments]
    path = os.pathsep.join(filter(None, [str(package_data.ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=project,
        env={**os.environ, "PYTHONPATH": path},
    )
    return CommandResult(done.returncode, done.stdout, done.stderr)


@pytest.mark.attack(STRANGER, "a FIFO as a requirements file, a parent or a lock", WITHOUT_END)
@pytest.mark.parametrize("name", ["base.txt", "profiles/base.yaml", "profiles/sample.lock.yaml"])
def test_a_fifo(project: Path, name: str) -> None:
    os.mkfifo(project / name)
    write_profile(project, {"extends": "./base.yaml"} if name.endswith("base.yaml") else PROFILE)
    written(project, {"requirements.txt": "-r base.txt\n"})
    command = ["lock", "sample", "--requirements", "requirements.txt"] if name == "base.txt" else ["show", "sample"]
    done = ended(project, *command)
    assert done.code == 3, done.stderr
    assert Path(name).name in done.stderr


@pytest.mark.attack(STRANGER, "a link to /dev/zero as a requirements file, a parent or a lock", WITHOUT_END)
@pytest.mark.parametrize("name", ["base.txt", "profiles/base.yaml", "profiles/sample.lock.yaml"])
def test_a_device_without_end(project: Path, name: str) -> None:
    (project / name).symlink_to("/dev/zero")
    write_profile(project, {"extends": "./base.yaml"} if name.endswith("base.yaml") else PROFILE)
    written(project, {"requirements.txt": "-r base.txt\n"})
    command = ["lock", "sample", "--requirements", "requirements.txt"] if name == "base.txt" else ["show", "sample"]
    assert "leads out of the project's folder" in refused(project, *command)


@pytest.mark.attack("user's own mistake", "a FIFO, /dev/zero or a file of /proc on the command line", WITHOUT_END)
@pytest.mark.parametrize("file", ["fifo.txt", "/dev/zero", "/proc/self/pagemap", "/proc/self/environ"])
def test_a_file_without_end_on_the_command_line(project: Path, file: str) -> None:
    write_profile(project, PROFILE)
    os.mkfifo(project / "fifo.txt")
    done = ended(project, "lock", "sample", "--requirements", file)
    assert done.code == 3 and file in done.stderr, done.stderr


# legitimate files, which must be accepted


@pytest.mark.legitimate(STRANGER, "-r of files of the same project, in folders below", "they are read")
def test_includes_of_the_same_project(project: Path) -> None:
    write_profile(project, PROFILE)
    written(
        project,
        {
            "requirements.txt": "einops\n-r base.txt\n-r sub/more.txt\n",
            "base.txt": "tqdm\n",
            "sub/more.txt": "-r deep/last.txt\n-r ../again.txt\n",
            "sub/deep/last.txt": "rich\n",
            "again.txt": "attrs\n",
        },
    )
    (project / "sub" / "linked.txt").symlink_to("../base.txt")
    packages = profile_reader_and_overrides.load("sample", {}, Path("requirements.txt")).profile.packages
    assert packages == ("numpy", "einops", "tqdm", "rich", "attrs")


@pytest.mark.legitimate("user", "--requirements FILE of another folder, then the name of its lock", "both are read")
@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt", "pyproject.toml"])
def test_requirements_of_another_folder(project: Path, name: str) -> None:
    write_profile(project, PROFILE)
    file = project.parent / "theirs" / name
    text = '[project]\nname = "x"\ndependencies = ["einops"]\n' if name == "pyproject.toml" else "-r base.txt\n"
    written(file.parent, {name: text, "base.txt": "einops\n"})
    loaded = profile_reader_and_overrides.load("sample", {}, file)
    assert loaded.profile.packages == ("numpy", "einops")
    lock_file.write(lock_for(plan_resolver.resolve(loaded)), loaded.lock_file, loaded.name, loaded.origin)
    shown = envbuild("show", loaded.name, "--json")
    assert (shown.code, shown.document["lock_state"]) == (0, "current")


@pytest.mark.legitimate("user", "names a profile or requirements file that is a link", "it is read")
def test_a_link_on_the_command_line(project: Path) -> None:
    elsewhere = project.parent / "elsewhere"
    written(elsewhere, {"shared.yaml": json.dumps(PROFILE), "packages.txt": "einops\n"})
    (project / "linked.yaml").symlink_to(elsewhere / "shared.yaml")
    (project / "linked.txt").symlink_to(elsewhere / "packages.txt")
    assert profile_reader_and_overrides.load("./linked.yaml", {}, Path("linked.txt")).profile.packages == (
        "numpy",
        "einops",
    )


@pytest.mark.legitimate(
    STRANGER, "extends: of a sibling, by name and by path, and of a profile in projects/", "it is read"
)
@pytest.mark.parametrize("parent", ["parent", "./parent.yaml", "../profiles/projects/below.yaml", "below"])
def test_parents_of_the_same_project(project: Path, parent: str) -> None:
    write_profile(project, PROFILE, "parent")
    written(project, {"profiles/projects/below.yaml": "extends: ../parent.yaml\n"})
    write_profile(project, {"extends": parent, "description": "mine"})
    assert profile_reader_and_overrides.load("sample").profile.torch == PROFILE["torch"]


@pytest.mark.legitimate(STRANGER, "extends: of a shipped profile by its name", "it is read")
@pytest.mark.parametrize("installed", [False, True])
def test_a_shipped_parent(project: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    if installed:  # as uv does with links into its cache
        root = project.parent / "site-packages" / "envbuild" / "shipped"
        (root / "profiles").mkdir(parents=True)
        for file in package_data.PROFILES.glob("*.yaml"):
            (root / "profiles" / file.name).symlink_to(file)
        monkeypatch.setattr(package_data, "ROOT", root)
        monkeypatch.setattr(package_data, "PROFILES", root / "profiles")
    write_profile(project, {"extends": "h20", "description": "mine"})
    assert profile_reader_and_overrides.load("sample").profile.gpus == ("h20",)
    assert envbuild("show", "h20").code == 0
