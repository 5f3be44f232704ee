from __future__ import annotations

import re
from pathlib import Path

import pytest

from envbuild.doctor import site_settings_validation
from envbuild.image import registry_push
from envbuild.registry.image_reference_patterns import REGISTRY
from envbuild.util import network_settings, settings, user_folders
from envbuild.util.errors import SettingsError, UsageError
from envbuild.util.runner_names import RUNNERS
from unit.support import PROFILE, configure, envbuild, write_profile


def refused(text: str) -> SettingsError:
    configure(text)
    with pytest.raises(SettingsError, match=r"config\.yaml") as caught:
        settings.setting("debian_mirror")
    return caught.value


def test_without_a_file_nothing_is_set() -> None:
    assert settings.setting("debian_mirror") is None
    assert settings.names() == ()


@pytest.mark.parametrize("text", ["", "# debian_mirror: http://mirror.example/debian\n", "---\n"])
def test_an_empty_file_sets_nothing(text: str) -> None:
    configure(text)
    assert settings.names() == ()


def test_a_setting_is_read() -> None:
    configure("debian_mirror: http://mirror.example/debian\n")
    assert settings.setting("debian_mirror") == "http://mirror.example/debian"
    assert settings.setting("debian_snapshot") is None


def test_words_and_numbers_of_old_yaml_are_what_was_written() -> None:
    configure("on: slurm\nslurm:\n  time: 1:30:00\n  account: 0012\n")
    assert settings.setting("on") == "slurm"
    assert settings.section("slurm") == {"time": "1:30:00", "account": "0012"}


@pytest.mark.parametrize("name", RUNNERS)
def test_every_runner_that_an_option_names_can_be_set(name: str) -> None:
    configure(f"on: {name}\n")
    assert settings.setting("on") == name


@pytest.mark.parametrize(
    "text",
    [
        "debian_miror: x\n",
        "debian_mirror: 1\n",
        "debian_mirror: [x]\n",
        "debian_mirror:\n",
        "on: condor\n",
        "on: network\n",
        "slurm: h20\n",
        "- x\n",
        "plain\n",
        "a: [\n",
        "a: !!python/object:os.system x\n",
        "1: x\n",
        "a: !!bool x\n",
        "a: !!int ''\n",
        "a: " + "[" * 600,  # deeper than Python goes
    ],
)
def test_an_invalid_file_is_named(text: str) -> None:
    refused(text)


def test_invalid_utf8_is_reported_with_its_line() -> None:
    configure("")
    user_folders.config_file().write_bytes(b"# a\non: \xff\n")
    settings.settings_document.cache_clear()
    with pytest.raises(SettingsError, match="not UTF-8") as caught:
        settings.setting("on")
    assert [fault.line for fault in caught.value.faults] == [2]


def test_all_faults_come_at_once_with_their_lines() -> None:
    error = refused("debian_miror: x\narchives: 1\n\nkubernetes: []\n")
    file = str(user_folders.config_file())
    assert [str(fault) for fault in error.faults] == [
        f"{file}:1: debian_miror: unknown setting (did you mean debian_mirror?)",
        f"{file}:2: archives: must be text: put it in quotes",
        f"{file}:4: kubernetes: must be a mapping of keys to values",
    ]
    assert error.code == 3


def test_doctor_reads_them_whole() -> None:
    configure("slurm:\n  partition: a b\n  gres: {nosuch: x}\nsigning_key: /no/such.key\nkubernetes:\n  queue: soon\n")
    faults = site_settings_validation.read().faults
    assert [text.removeprefix(f"{user_folders.config_file()}:").split(": ")[:2] for text in faults] == [
        ["4", "signing_key"],
        ["2", "slurm.partition"],
        ["3", "slurm.gres"],
        ["6", "kubernetes.queue"],
    ]


def test_doctor_reports_an_invalid_file_and_fails(project: Path) -> None:
    configure("debian_miror: x\narchives: 1\n")
    done = envbuild("doctor", "--json")
    assert done.code == 5
    (check,) = (check for check in done.document["checks"] if check["id"] == "settings")
    assert check["state"] == "fail"
    assert ":1: debian_miror" in check["detail"] and ":2: archives" in check["detail"]
    assert "known: on, archives" in check["remedy"]


EVERY = """on: slrum
slurm:
  registry: http://foo/bar
  gres: gpu:h20
  partion: x
kubernetes:
  namspace: y
  registry: example.com/team/x:tag
signing_key: /no/such.key
network:
  deadline: soon
  ratee: 1
  token_services: {a.example: https://b.example}
"""
FAULTS = [
    "1: on: must be one of local, slurm, kubernetes, not 'slrum' (did you mean slurm?)",
    "9: signing_key: must be the path of a file with a private key: no such file",
    "3: slurm.registry: must be HOST/REPOSITORY, without http:// or https://, without a tag, and "
    "without _ in HOST, not 'http://foo/bar'",
    "5: slurm.partion: unknown setting (did you mean partition?)",
    "4: slurm.gres: must be a mapping of GPU to name, as in {h20: gpu:h20}, not 'gpu:h20'",
    "8: kubernetes.registry: must be HOST/REPOSITORY, without http:// or https://, without a tag, and "
    "without _ in HOST, not 'example.com/team/x:tag'",
    "7: kubernetes.namspace: unknown setting (did you mean namespace?)",
    "11: network.deadline: must be a number of seconds from 1 to 86400",
    "12: network.ratee: unknown setting (did you mean rate?)",
    "13: network.token_services: must be a mapping of HOST[:PORT] to HOST[:PORT]",
]


def test_no_fault_hides_another(project: Path) -> None:
    configure(EVERY)
    file = user_folders.config_file()
    assert sorted(site_settings_validation.read().faults) == sorted(f"{file}:{fault}" for fault in FAULTS)
    (check,) = (check for check in envbuild("doctor", "--json").document["checks"] if check["id"] == "settings")
    assert all(fault in check["detail"] for fault in FAULTS)
    write_profile(project, PROFILE)
    errors = {verb: envbuild(verb, named).stderr for verb, named in (("show", "cpu"), ("verify", "example.com/x"))}
    for command, stderr in errors.items():
        assert all(f"{file}:{fault}" in stderr for fault in FAULTS), (command, stderr)


@pytest.mark.parametrize("host", ["b.example:65536", "[::g]", "[:::]"])
def test_a_host_that_has_no_valid_address_is_refused(host: str) -> None:
    with pytest.raises(UsageError):
        network_settings.parse({"token_services": {"a.example": host}}, {})


@pytest.mark.parametrize(
    "key", ["|\n  -----BEGIN PRIVATE KEY-----\n  c2VjcmV0", "c2VjcmV0", "c2VjcmV0/A==", "~c2VjcmV0"]
)
def test_a_private_key_in_the_settings_is_not_shown(project: Path, key: str) -> None:
    configure(f"signing_key: {key}\n")
    (fault,) = site_settings_validation.read().faults
    assert "signing_key" in fault and "c2VjcmV0" not in fault
    assert "c2VjcmV0" not in envbuild("doctor").stdout


def test_a_key_that_is_there_twice_hides_no_other_fault() -> None:
    error = refused("on: local\non: slrum\nslurm: x\n")
    assert [fault.line for fault in error.faults] == [2, 3]


def test_a_fault_of_a_section_alone_leaves_the_other_settings_as_they_are() -> None:
    configure("slurm: {gres: x}\ndebian_mirror: http://mirror.example/debian\n")
    assert settings.setting("debian_mirror") == "http://mirror.example/debian"


@pytest.mark.parametrize(
    ("value", "good"),
    [
        ("registry.example/team/h20", True), ("localhost/x", True), ("localhost:5000/x", True),
        ("[::1]:5000/x/y", True), ("team/x", True), ("x", True), ("a__b/c-d", True),
        ("http://foo/bar", False), ("foo/bar:tag", False), (f"foo/bar@sha256:{'0' * 64}", False), ("foo/", False),
        ("Foo/bar", False), ("foo.example/Bar", False), ("/x", False), ("foo.example:x/y", False),
    ],
)  # fmt: skip
def test_settings_and_push_accept_the_same_registry_names(value: str, good: bool) -> None:
    assert bool(re.fullmatch(REGISTRY[0], value)) is good
    try:
        assert registry_push.parse_repository(value) and good
    except UsageError as error:
        assert not good and "TAG" not in str(error.hint)


@pytest.mark.parametrize("arguments", [[], ["cpu"]])
def test_show_answers_and_reports_invalid_settings(arguments: list[str]) -> None:
    configure("debian_miror: x\n")
    done = envbuild("show", *arguments)
    assert (done.code, "cpu" in done.stdout) == (0, True)
    assert ":1: debian_miror: unknown setting" in done.stderr
    assert envbuild("show", *arguments, "--json").document


def test_where_each_value_of_a_section_is_set() -> None:
    configure("slurm:\n  partition: a\n  gres:\n    h20: gpu:x\n    a100: gpu:y\n  account: team\n")
    file = user_folders.config_file()
    assert settings.origins("slurm", {"account": "other", "gres.a100": "gpu:z"}) == {
        "partition": f"{file}:2",
        "gres.h20": f"{file}:4",
        "gres.a100": "--slurm",
        "account": "--slurm",
    }


def test_folders_are_made_where_the_platform_wants_them() -> None:
    assert user_folders.cache_folder("wheels").is_dir()
    assert user_folders.state_folder("evidence").is_dir()
    assert user_folders.cache_folder("x") != user_folders.state_folder("x")
