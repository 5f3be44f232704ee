"""The documents: every link has a target, every command in them has the shown options, and the commands run.

A command that needs an engine, a GPU, a cluster or a network is not run here: `RUN_ELSEWHERE` names the test that runs
such a command, or `NOT_RUN` gives the reason why no test does. The parser of each command checks the options, also of
commands that are not run here.
"""

from __future__ import annotations

import doctest
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest

import envbuild
from envbuild.cli.entry import COMMANDS, cli
from envbuild.util import user_folders
from unit.support import envbuild as run_envbuild

ROOT = Path(envbuild.__file__).parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "evidence/README.md",
    *sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "docs").rglob("*.md")),
)
# Pages whose text mentions commands of earlier versions.
OF_THEIR_TIME = {"CHANGELOG.md", *(page for page in PAGES if page.startswith("docs/decisions/"))}
RECORDS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
KNOWN = {name for group in COMMANDS.values() for name in group}

_FINGERPRINT = "tests/unit/pipeline/test_make_build_and_test.py::test_a_fingerprint_is_kept_of_a_failed_run_too"
# The beginning of a command -> the test that runs such a command elsewhere: with a small profile, and with an engine, a
# cluster, a registry or an environment of its own. The longest beginning that fits a command counts.
RUN_ELSEWHERE = {
    "audit --here": "tests/unit/audit/test_environment_audit.py::test_the_active_environment_is_audited",
    "audit --here --gpu": "tests/unit/repair/test_repair_plan.py::test_without_a_log_the_gpu_can_be_named",
    "audit --here --profile": "tests/e2e/test_audit.py::test_an_environment_is_audited_without_an_engine",
    "audit registry/image:tag": "tests/e2e/test_images.py::test_it_audits_clean_and_has_loaded_what_is_locked",
    "bisect": "tests/e2e/test_frontends.py::test_bisect_finds_the_version_and_leaves_everything_as_it_was",
    "bisect h20": "tests/e2e/test_frontends.py::test_bisect_searches_the_gpu_first_and_leaves_nothing_behind",
    "build": "tests/e2e/test_apt.py::test_a_second_build_without_the_cached_packages_gives_the_same_image",
    "doctor": "tests/unit/cli/test_doctor.py::test_doctor_for_a_profile_checks_that_the_index_has_its_wheels",
    "doctor --cluster": "tests/unit/doctor/test_node_comparison.py::test_the_odd_node_is_named_through",
    "fix": "tests/unit/repair/test_repair_plan.py::test_the_command_prints_the_fix",
    "fix --here --gpu": "tests/unit/repair/test_repair_plan.py::test_without_a_log_the_gpu_can_be_named",
    "fix --image": "tests/e2e/test_fix.py::test_an_image_without_faults_needs_nothing",
    "fix train.log --image": "tests/e2e/test_fix.py::test_the_printed_dockerfile_gives_a_fixed_image",
    "fix --python .venv --gpu": "tests/unit/repair/test_repair_plan.py::test_without_a_log_the_gpu_can_be_named",
    "fix --python .venv --undo": "tests/unit/repair/test_repair_run.py::test_uv_fixes_it_and_undo_restores_every_file",
    "fix train.log --here --apply": (
        "tests/unit/repair/test_repair_run.py::test_uv_fixes_it_and_undo_restores_every_file"
    ),
    "fix train.log --python .venv --apply": (
        "tests/unit/repair/test_repair_run.py::test_uv_fixes_it_and_undo_restores_every_file"
    ),
    "init mine --from-env": "tests/unit/audit/test_profile_draft.py::test_init_writes_what_an_environment_holds",
    "init myproject --from-env": "tests/unit/audit/test_profile_draft.py::test_init_writes_what_an_environment_holds",
    "init myproject --from-image": "tests/e2e/test_gpu_image.py::test_a_profile_is_written_from_what_it_holds",
    "load": "tests/e2e/test_push.py::test_a_bundle_is_verified_and_loaded_on_the_other_side",
    "lock --check": "tests/unit/cli/test_entry.py::test_lock_check_is_offline_and_says_what_is_stale",
    "lock ID": "tests/e2e/test_install.py::test_a_lock_and_a_dockerfile_are_written_here",
    "lock cpu --requirements": (
        "tests/unit/lock/test_lock_creation_and_update.py::test_a_projects_requirements_are_locked_under_a_profiles_pins"
    ),
    "lock mine": "tests/e2e/test_install.py::test_a_lock_and_a_dockerfile_are_written_here",
    "make": "tests/e2e/test_make.py::test_a_second_make_has_nothing_to_do",
    "make h20": "tests/e2e/test_gpu_image.py::test_without_a_gpu_make_stops_before_anything_is_fetched",
    "make h20 a100": "tests/e2e/test_several.py::test_a_passing_profile_is_verified_though_another_fails",
    "pin-digests": "tests/e2e/test_push.py::test_a_pinned_dockerfile_names_the_digest",
    "prune": (
        "tests/unit/image/test_image_and_cache_pruning.py::"
        "test_a_lock_without_a_profile_of_its_name_keeps_what_it_needs"
    ),
    "push": "tests/e2e/test_push.py::test_a_pushed_image_is_verified_without_an_engine",
    "push h20 registry.example/h20 --python": (
        "tests/e2e/test_environments.py::test_an_equal_environment_elsewhere_is_verified"
    ),
    "run": "tests/unit/repair/test_fixed_library_folder_and_variables.py::"
    "test_a_program_loads_the_fixed_library_although_torch_has_an_rpath",
    "save": "tests/e2e/test_push.py::test_a_bundle_is_verified_and_loaded_on_the_other_side",
    "show h20-cu12 --pin": "tests/unit/test_documents.py::test_the_readme_shows_what_its_commands_print",
    "status": "tests/e2e/test_make.py::test_status_says_verified",
    "status cpu --python": "tests/unit/pipeline/test_environment_proof.py::test_the_status_says_what_changed",
    "status h20 --python": "tests/unit/pipeline/test_environment_proof.py::test_the_status_says_what_changed",
    "status mine --outdated": "tests/unit/lock/test_outdated_pins.py::test_status_outdated_reports_one_profile_or_all",
    "test a100 --fingerprint": _FINGERPRINT,
    "test cpu": "tests/e2e/test_container.py::test_the_container_may_do_nothing",
    "test cpu --image": "tests/e2e/test_container.py::test_leftovers_of_a_killed_envbuild_are_removed_by_the_next",
    "test cpu --junit": "tests/e2e/test_frontends.py::test_only_what_is_asked_for_runs_and_must_pass",
    "test cpu --level": "tests/unit/pipeline/test_make_build_and_test.py::test_requested_options_reach_the_pipeline",
    "test cpu --probe": "tests/e2e/test_frontends.py::test_only_what_is_asked_for_runs_and_must_pass",
    "test cpu --python": "tests/unit/runners/test_host_runner.py::test_an_environment_that_is_as_locked_passes",
    "test h20 --python .venv --record": (
        "tests/unit/pipeline/test_environment_proof.py::test_a_proved_environment_is_verified"
    ),
    "test h20 --record --on slurm": "tests/e2e/test_slurm.py::test_an_image_is_verified_through_slurm",
    "test mine --python": (
        "tests/unit/runners/test_host_runner.py::test_output_and_notes_of_the_profiles_script_are_shown"
    ),
    "test step-video --record --on kubernetes": (
        "tests/e2e/test_kubernetes.py::test_an_image_is_verified_through_kubernetes"
    ),
    "test step-video --record --on kubernetes --dry-run": (
        "tests/unit/pipeline/test_runner_selection.py::test_a_dry_run_works_for_a_profile_that_is_only_locked"
    ),
    "test step-video --record --on slurm": "tests/e2e/test_slurm.py::test_an_image_is_verified_through_slurm",
    "test step-video --record --on slurm --dry-run": (
        "tests/unit/pipeline/test_runner_selection.py::test_a_dry_run_works_for_a_profile_that_is_only_locked"
    ),
    "test step-video --record --on slurm --nodes": ("tests/e2e/test_slurm.py::test_ranks_on_two_nodes_work_together"),
    "test step-video --record --on slurm --resume": "tests/e2e/test_slurm.py::test_a_lost_waiting_process_is_resumed",
    "test v100 --fingerprint": _FINGERPRINT,
    "verify": "tests/e2e/test_push.py::test_a_pushed_image_is_verified_without_an_engine",
    "verify --evidence": "tests/unit/attest/test_image_verifier.py::test_a_signed_statement_is_checked_by_itself",
    "verify --python": "tests/unit/pipeline/test_environment_proof.py::test_a_proved_environment_is_verified",
    "verify registry.example/h20 --python": (
        "tests/e2e/test_environments.py::test_an_equal_environment_elsewhere_is_verified"
    ),
    "verify MYAPP": "tests/e2e/test_push.py::test_a_child_that_adds_a_package_is_verified_by_its_base",
    "verify mirror.example/cpu:verified": "tests/attacks/test_registry.py::test_a_copy_to_another_repository",
    "verify mirror.example/h20:verified": "tests/attacks/test_registry.py::test_a_copy_to_another_repository",
    "verify registry.example/app": ("tests/e2e/test_push.py::test_a_child_that_adds_a_package_is_verified_by_its_base"),
    "verify registry.example/h20:verified --key team.pub --gpu": (
        "tests/unit/attest/test_image_verifier.py::test_evidence_is_refused_by_age"
    ),
    "verify registry.example/h20:verified --key team.pub --rebuild": (
        "tests/unit/pipeline/test_rebuild_comparison.py::test_verify_refuses_what_the_lock_does_not_give"
    ),
    "verify registry.example/h20:verified --policy": (
        "tests/unit/attest/test_image_verifier.py::test_a_policy_is_a_file"
    ),
}
# The beginning of a command -> why no test runs such a command. For each, a test is skipped with this reason.
NOT_RUN = {
    "export oci": "needs mmdebstrap and gigabytes of packages; test_layout_export.py tests the layout that it writes",
    "install": "needs the wheels of h20; test_lock_installer.py tests the installer without the command line",
    "lock cpu --upgrade": "needs a package index; "
    "test_lock_creation_and_update.py tests the upgrade without the command line",
    "lock mine --upgrade": "needs a package index; "
    "test_lock_creation_and_update.py tests the upgrade without the command line",
    "make h20 --requirements": "needs a GPU or --allow-unproved; "
    "test_lock_creation_and_update.py tests lock --requirements",
    "test h20 --probe": "needs an H20 and its image",
    "test h20 --python": "needs an H20",
}
PLACEHOLDERS = {"COMMIT": "0" * 40, "ID": "l20", "REGISTRY": "registry.example", "MYAPP": "registry.example/app"}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """Return the ids that GitHub generates for the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    assert {(page, link) for page in PAGES for link in wrong_links(page)} == set()


def wrong_links(page: str) -> Iterator[str]:
    without_code = re.sub(r"```.*?```|`[^`\n]*`", "", text_of(page), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            yield link


def commands(page: str) -> list[str]:
    """Return the commands of a page, on separate lines or as code in a sentence, without their comments."""
    found = re.findall(r"^(?:    |\$ )envbuild ([a-z].*)$", text_of(page), re.MULTILINE)
    found += re.findall(r"`envbuild ([a-z][^`]*)`", text_of(page).replace("\n", " "))
    return [line.partition(" #")[0].strip() for line in found]


def lines(page: str) -> Iterator[str]:
    """Return the commands of a page that are on separate lines."""
    for line in re.findall(r"^    envbuild (.*)$", text_of(page), re.MULTILINE):
        yield line.partition(" #")[0].strip()


def words_of(line: str) -> list[str]:
    for name, value in PLACEHOLDERS.items():
        line = re.sub(rf"\b{name}\b", value, line)
    return shlex.split(line)


@pytest.mark.parametrize("page", PAGES)
def test_a_command_on_a_line_of_its_own_is_one_that_its_parser_takes(page: str) -> None:
    for line in lines(page):
        with cli.make_context("envbuild", words_of(line)) as context:
            command: click.Command = cli
            while isinstance(command, click.Group):
                name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
                assert found is not None, line
                context = found.make_context(name, rest, parent=context)
                command = found


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OF_THEIR_TIME])
def test_a_command_in_a_sentence_has_the_options_that_it_is_shown_with(page: str) -> None:
    for line in commands(page):
        name, *words = line.split()
        if name == "--help" or name.endswith("/"):
            continue
        assert name in KNOWN, f"envbuild {line}"
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        parameters = list(command.params)
        if isinstance(command, click.Group) and words:
            parameters += command.commands[words[0]].params
        known = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
        own = words[: words.index("--")] if "--" in words else words  # the rest is for the program that it starts
        options = {word.rstrip(",;.") for word in own if word.startswith("-") and word != "-"}
        assert options <= known | {"--help"}, f"envbuild {line}: {options - known}"


@pytest.fixture
def folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder with the files that the guides mention."""
    log = re.findall(r"train\.log</summary>\n\n```text\n(.*?)^```", text_of("README.md"), re.MULTILINE | re.DOTALL)[0]
    (project / "train.log").write_text(log, encoding="utf-8")
    (project / "logs").mkdir()
    (project / "logs" / "rank0.log").write_text(log, encoding="utf-8")
    (project / "dmesg.txt.gz").write_bytes(b"")
    prints = ROOT / "tests" / "golden" / "fingerprints"
    for name, source in (("a100", "torch-2.0.1"), ("h20", "torch-2.13.0"), ("v100", "torch-2.13.0")):
        shutil.copy(prints / f"{source}.json", project / f"{name}.json")
    shutil.copy(ROOT / "README.md", project)
    shutil.copytree(ROOT / "evidence", project / "evidence")
    (project / "passphrase").write_text("a passphrase\n", encoding="utf-8")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{project}/no-engine.sock")
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE_FILE", str(project / "passphrase"))
    user_folders.config_file().parent.mkdir(parents=True)
    user_folders.config_file().write_text(
        f"ci_install: git+https://git.example/envbuild@{'0' * 40}\n", encoding="utf-8"
    )
    return project


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in OF_THEIR_TIME and any(lines(page))])
def test_commands_run(page: str, folder: Path) -> None:
    """All commands of a page run in one folder, in the order of the page."""
    for line in lines(page):
        if beginning(line, RUN_ELSEWHERE) or beginning(line, NOT_RUN):
            continue
        done = run_envbuild(
            *[str(Path(word).expanduser()) if word.startswith("~/") else word for word in words_of(line)]
        )
        assert done.code == 0, f"envbuild {line}\n{done.stderr}"


def beginning(line: str, table: Mapping[str, str]) -> str | None:
    """Return the longest key of the table that a command begins with, unless the other table has a longer key."""
    fits = [begin for begin in (*RUN_ELSEWHERE, *NOT_RUN) if f"{line} ".startswith(f"{begin} ")]
    longest = max(fits, key=len, default=None)
    return longest if longest in table else None


def test_each_beginning_is_that_of_a_command() -> None:
    every = {line for page in PAGES for line in lines(page)}
    used = {beginning(line, RUN_ELSEWHERE) or beginning(line, NOT_RUN) for line in every}
    assert sorted({*RUN_ELSEWHERE, *NOT_RUN} - used) == []


def test_a_command_that_is_not_run_here_is_run_by_an_existing_test() -> None:
    for begin, test in RUN_ELSEWHERE.items():
        name, _, function = test.partition("::")
        text = (ROOT / name).read_text(encoding="utf-8")
        assert re.search(rf"^def {function}\(", text, re.MULTILINE), test
        near = [ROOT / name, *(ROOT / name).parent.glob("*.py"), *(ROOT / "tests" / "unit").glob("*.py")]
        assert any(f'"{begin.split()[0]}"' in file.read_text(encoding="utf-8") for file in near), begin


@pytest.mark.parametrize("begin", NOT_RUN)
def test_a_command_that_no_test_runs_is_reported_as_skipped(begin: str) -> None:
    pytest.skip(f"envbuild {begin}: {NOT_RUN[begin]}")


def test_the_first_page_is_what_is_sought_first() -> None:
    text = text_of("README.md")
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles[:4] == ["A job has crashed", "A first image", "Your own project", "Base images and CI"]
    assert "No GPU profile has been tested on a physical GPU yet".lower() in text.partition("\n## ")[0].lower()
    assert len(text.splitlines()) < 200


def test_every_decision_is_in_their_list() -> None:
    files = {file.name for file in (ROOT / "docs" / "decisions").glob("0*.md")}
    assert set(re.findall(r"\((0[^)]*\.md)\)", text_of("docs/decisions/README.md"))) == files


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_a_decision_has_the_form_of_a_record_and_at_most_350_words(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ .*$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    assert headings[1:] == ["## Context", "## Decision", "## Consequences"]
    assert text.splitlines()[0] == headings[0]
    assert re.fullmatch(
        r"Status: (accepted|draft|superseded (in part )?by \[\d+\]\(\d{4}-[a-z0-9-]+\.md\))", text.splitlines()[2]
    )
    assert len(text.split()) <= 350


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """In strict mode, broken links and anchors and pages that are missing in the menu are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "guides" / "crash.html").is_file()


def consoles(page: str) -> list[tuple[str, str]]:
    """Return the commands of a page that are shown with their output, and that output; `...` there matches any text."""
    blocks = re.findall(r"^```console\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)
    found = [part.partition("\n") for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE) if part]
    return [(command, output) for command, _, output in found]


@pytest.mark.slow
def test_the_readme_shows_what_its_commands_print(folder: Path) -> None:
    """Run in a folder that contains the example log. Texts from the checkout's profiles are compared with the
    checkout."""
    shown = consoles("README.md")
    assert len(shown) >= 4
    for command, output in shown:
        name, *words = shlex.split(command)
        assert name == "envbuild"
        done = subprocess.run(
            [sys.executable, "-m", "envbuild", *words], cwd=folder, capture_output=True, text=True, timeout=120
        )
        printed = (done.stdout + done.stderr).replace(f"{ROOT}/", "")
        same = doctest.OutputChecker().check_output(output, printed, doctest.ELLIPSIS)
        assert same, f"$ {command}\n{printed}"
