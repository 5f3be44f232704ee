"""Tests of the structure of the code: which package may import which, and which may print, exit, or start a process;
names, sizes and docstrings of modules."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import envbuild as package
from envbuild.facts import probe_catalogue_reader

ROOT = Path(package.__file__).parent
TESTS = Path(__file__).parents[1]
# In the order of the data flow: a package imports itself and those before it, never those after it.
PACKAGES = (
    "util",
    "selftest",  # of this package, only READERS
    "facts",
    "fetch",
    "registry",
    "profile",
    "resolve",
    "lock",
    "image",
    "testrun",
    "runners",
    "audit",
    "evidence",
    "attest",
    "doctor",
    "explain",
    "repair",
    "report",
    "pipeline",
    "cli",
)
READERS = {
    f"envbuild.selftest.{name}"
    for name in (
        "harness.probe_outcome_and_figures",
        "inventory.device_code_compatibility",
        "inventory.extension_file_reader",
        "inventory.elf_reader",
        "inventory.fatbin_reader",
        "inventory.startup_files",
    )
}
IN_THE_ZIP = {"envbuild.testrun.standalone_lock_check"}  # runs only in the zip of the self-test, with its modules
MOST_MODULES = 20  # limit for a package, at one level
SAME_NAME = {"__main__", "model"}  # base names that mean the same in several packages
# Public functions with the same name in several modules do the same job, for the subject in the module's name:
# `lock_file.read`, `junit_writer.render`. Classes have no such list, and no other function has its name twice.
SHARED_FUNCTIONS = {
    "case": "the case at a sampled point, of each module of cases",
    "cases": "every case that is not sampled, of each module of cases",
    "check": "run cases and judge them: one case, or those sampled of operations",
    "command": "what each file in cli/ defines for click, and the self-test's own command line",
    "document": "the JSON document that says what the module is about",
    "fingerprint": "record one: of the probe's operations, and in selftest/model.py of a user's model",
    "main": "the entry point of a process",
    "parse": "text or a document of others to a model",
    "possible": "whether a sampled point is one that can be tried",
    "read": "from a file, a folder or a stream to a model",
    "render": "from a model to the text of a file",
    "run": "run to its end: a program, or the self-test's plan",
    "sampled_operations": "the operations whose cases are sampled, of each module of cases",
    "softmax": "the operation in float64, and its tolerance",
    "write": "from a model to a file",
}
LONG = 20  # lines; a shorter function may need no docstring


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in sorted(ROOT.rglob("*.py"))}
SELFTEST = {name for name in FILES if name.startswith("envbuild.selftest")}
REST = sorted(set(FILES) - SELFTEST)


@cache
def tree(name: str) -> ast.Module:
    text = FILES[name].read_text(encoding="utf-8")
    try:
        return ast.parse(text)
    except SystemError:  # Python 3.11 counts the recursion of another thread, such as a test's server (gh-106905)
        return ast.parse(text)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every node that runs; code under TYPE_CHECKING does not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from statements(child)


@cache
def imports(name: str) -> frozenset[str]:
    found = set()
    for node in statements(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            assert node.module is not None
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {part if part in FILES else node.module for part in inner}
    return frozenset(found)


def own_imports(name: str) -> set[str]:
    return {found for found in imports(name) if found in FILES and found != "envbuild"}


def layer(name: str) -> int:
    part = name.split(".")[1]
    return len(PACKAGES) if part == "__main__" else PACKAGES.index(part)


def calls(name: str) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree(name)) if isinstance(node, ast.Call)}


@pytest.mark.slow
def test_imports_go_one_way() -> None:
    names = [name for name in REST if name != "envbuild"]
    assert {(name, other) for name in names for other in own_imports(name) if layer(other) > layer(name)} == set()


def test_the_root_holds_packages_only() -> None:
    found = {path.name for path in ROOT.iterdir() if path.name != "__pycache__"}
    assert found == {*PACKAGES, "__init__.py", "__main__.py"}
    assert all((ROOT / package / "__init__.py").is_file() for package in PACKAGES)


def in_package(name: str) -> bool:
    """Whether this is a module of a package whose files are not named after commands."""
    return FILES[name].name != "__init__.py" and name.split(".")[1] != "cli"


def test_no_package_is_too_large() -> None:
    sizes = Counter(name.rpartition(".")[0] for name in FILES if name != "envbuild" and in_package(name))
    assert {package: size for package, size in sizes.items() if size > MOST_MODULES} == {}


def test_base_names_of_modules_are_unique() -> None:
    names = Counter(name.rpartition(".")[2] for name in FILES if name != "envbuild" and in_package(name))
    assert {name for name, count in names.items() if count > 1} <= SAME_NAME


def public(kind: type[ast.stmt]) -> Counter[str]:
    """Count the modules that define a public function, or class, of each name."""
    return Counter(
        name
        for module in FILES
        for name in {node.name for node in tree(module).body if isinstance(node, kind)}  # type: ignore[attr-defined]
        if not name.startswith("_")
    )


def test_public_functions_of_one_name_do_the_same_job() -> None:
    assert {name for name, count in public(ast.FunctionDef).items() if count > 1} == set(SHARED_FUNCTIONS)


def test_names_of_public_classes_are_unique() -> None:
    functions, classes = public(ast.FunctionDef), public(ast.ClassDef)
    assert {name for name, count in classes.items() if count > 1 or name in functions} == set()


def test_a_probes_function_has_the_probes_name() -> None:
    named = {probe.name: probe.function[1] for probe in probe_catalogue_reader.known_probes().values()}
    assert named == {name: name.replace(".", "_") for name in named}


@pytest.mark.parametrize(("tests", "mirrored"), [(TESTS / "unit", ROOT), (TESTS / "selftest", ROOT / "selftest")])
def test_folders_of_tests_mirror_packages(tests: Path, mirrored: Path) -> None:
    folders = {file.parent.relative_to(tests) for file in tests.rglob("test_*.py")}
    assert len(folders) > 1
    assert {str(folder) for folder in folders if not (mirrored / folder / "__init__.py").is_file()} == set()


def test_imports_have_no_cycle() -> None:
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in own_imports(name):
                visit(other, (*trail, name))
            done.add(name)

    for name in FILES:
        visit(name, ())


def test_other_packages_import_only_the_readers_of_the_selftest() -> None:
    """The readers interpret files and results, in a container and on the host, with only the standard library."""
    assert {name for name in REST if own_imports(name) & (SELFTEST - READERS)} == IN_THE_ZIP
    assert not any(own_imports(name) & IN_THE_ZIP for name in REST)
    for name in READERS:
        assert own_imports(name) <= READERS and not any(found.startswith("torch") for found in imports(name)), name


def test_the_selftest_imports_only_itself_torch_and_the_standard_library() -> None:
    allowed = {*sys.stdlib_module_names, "torch"}
    found = {(name, other) for name in SELFTEST for other in imports(name) if other not in SELFTEST}
    assert {(name, other) for name, other in found if other.split(".")[0] not in allowed} == set()


def test_only_one_module_starts_processes() -> None:
    starters = ("os.system", "os.popen", "os.fork", "pty.spawn", "os.posix_spawn", "os.exec", "os.spawn")
    assert {(name, call) for name in REST for call in calls(name) if call.startswith(starters)} == set()
    modules = {"subprocess", "multiprocessing", "pty"}
    assert [name for name in REST if imports(name) & modules] == ["envbuild.util.host_processes"]


@pytest.mark.slow
def test_only_the_command_line_exits_and_prints() -> None:
    exits = {"sys.exit", "exit", "quit", "os._exit", "SystemExit"}
    assert [name for name in REST if calls(name) & exits] == ["envbuild.cli.entry"]
    prints = {"print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"}
    assert [name for name in REST if ".cli." not in name and calls(name) & prints] == []


def test_init_files_are_empty() -> None:
    assert [file for file in ROOT.rglob("__init__.py") if file.read_bytes()] == []


@pytest.mark.slow
def test_modules_and_long_definitions_have_docstrings() -> None:
    names = [name for name in FILES if FILES[name].name not in ("__init__.py", "__main__.py")]
    assert [name for name in names if ".cli." not in name and not ast.get_docstring(tree(name))] == []
    lacking = {
        (name, node.name)
        for name in names
        for node in ast.walk(tree(name))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if (node.end_lineno or 0) - node.lineno >= LONG and not ast.get_docstring(node)
    }
    assert lacking == set()


IMPORTS = """
import importlib, json, sys
failed = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = repr(error)
print(json.dumps(failed))
"""


def import_all(names: Iterable[str]) -> dict[str, str]:
    """Import each module in one process, and return the errors."""
    wanted = sorted(name for name in names if not name.endswith("__main__"))
    command = [sys.executable, "-c", IMPORTS, json.dumps(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, cwd=ROOT.parent)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_every_module_can_be_imported() -> None:
    """As no import is circular, each module can then also be imported first. The self-test's modules and the others are
    imported in separate processes, because no program imports modules of both kinds."""
    with_torch = SELFTEST if importlib.util.find_spec("torch") else ()
    assert import_all(with_torch) == import_all(REST) == {}


HEAVY = (
    "torch",
    "docker",
    "pydantic",
    "jinja2",
    "requests",
    "yaml",
    "uv",
    "rich",
    "packaging",
    "cryptography",
    "securesystemslib",
    "cyclonedx",
    "kubernetes",
    "pynvml",
    "zstandard",
)


def loaded(names: Iterable[str], arguments: list[str]) -> list[str]:
    """Return which of these modules are loaded after a command."""
    code = (
        "import sys, json\nfrom envbuild.cli import entry\n"
        f"sys.argv = ['envbuild', *{arguments!r}]\n"
        "try:\n    entry.main()\nexcept SystemExit:\n    pass\n"
        f"print(json.dumps([name for name in {tuple(names)!r} if name in sys.modules]))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT.parent, check=True)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    assert loaded(HEAVY, arguments) == []


def test_show_answers_without_an_engine_and_an_index() -> None:
    """`show` takes only as long as its imports."""
    assert loaded(("torch", "docker", "requests", "jinja2", "uv", "rich"), ["show", "h20"]) == []
