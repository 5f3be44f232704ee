"""Renders a single file that checks an environment against a profile's lock, on any machine with torch. Pure, except
that it reads source files of envbuild.

The file is a Python script. The payload (the self-test and the profile's expectations) is in comments after the code.
If the file is truncated anywhere, it is either invalid Python (an unterminated string), or its checksum does not match.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from envbuild.facts import database
from envbuild.lock.lock_file import Lock
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.resolve import plan_resolver
from envbuild.testrun import expected_hardware, selftest_job
from envbuild.testrun.selftest_job import Expectations, RunRequest

# A single statement, so that no truncated copy is a program that exits with 0. If the code is truncated, Python's error
# shows the first line.
_SCRIPT = '''\
raise eval(compile(r"""# envbuild check: if Python's error shows this line, this file is truncated; export it again
#: Check whether this environment matches envbuild's profile NAME (lock LOCK).
#:
#:     python FILE                              or on every rank: torchrun --nproc-per-node N FILE
#:     python FILE --no-probes                  only versions, library files, driver and GPU model: no torch, under 2 s
#:
#: Needs Python 3.9 or newer, and torch. Exit status: 0 all checks passed; 5 a check failed (the fix is printed); 2
#: wrong arguments; 3 this file is damaged (1 if it is so damaged that Python cannot read it).
import base64, hashlib, json, os, shutil, sys, tempfile

try:
    with open(__file__, "rb") as file:
        body, _, seal = file.read().rpartition(b"#= ")
    if hashlib.sha256(body).hexdigest().encode() != seal.strip():
        raise ValueError("it is incomplete or was changed")
    lines = body.splitlines()
    document = json.loads(b"".join(line[3:] for line in lines if line.startswith(b"#- ")).decode())
    archive = base64.b64decode(b"".join(line[3:] for line in lines if line.startswith(b"#+ ")))
    startup = b"\\n".join(line[3:] for line in lines if line.startswith(b"#* "))
except (NameError, OSError, ValueError) as error:
    sys.stderr.write("envbuild check: this file is not usable: %s; export it again\\n" % error)
    sys.exit(3)
if sys.argv[1:] not in ([], ["--no-probes"]):
    help_requested = sys.argv[1:] in (["-h"], ["--help"])
    usage = [line[3:].decode() for line in lines if line.startswith(b"#:")]
    if not help_requested:
        sys.stderr.write("envbuild check: invalid arguments: %s\\n" % ascii(" ".join(sys.argv[1:]))[1:-1])
    (sys.stdout if help_requested else sys.stderr).write("\\n".join(usage) + "\\n")
    sys.exit(0 if help_requested else 2)
if sys.version_info < (3, 9):
    sys.stderr.write("envbuild check: Python 3.9 or newer is needed, this is %s\\n" % sys.version.split()[0])
    sys.exit(5)
folder = tempfile.mkdtemp(prefix="envbuild-")
try:
    path = os.path.join(folder, "selftest.zip")
    with open(path, "wb") as file:
        file.write(archive)
    sys.path.insert(0, path)
    if sys.argv[1:]:
        module = {"__name__": "standalone_lock_check"}
        exec(compile(startup, "standalone_lock_check.py", "exec"), module)
        status, text = module["check_startup"](document)
        (sys.stderr if status else sys.stdout).write(text)
        sys.exit(status)
    from envbuild.selftest.pretraining_environment_check import main

    sys.exit(main(document))
finally:
    shutil.rmtree(folder, ignore_errors=True)
""", __file__, "exec"))
# Expectations (#-), the code of --no-probes (#*), the self-test (#+) and the sha256 of all lines before it (#=).
'''


_STARTUP = Path(__file__).with_name("standalone_lock_check.py")


def render(loaded: LoadedProfile, locked: Lock) -> str:
    """Render the script. The same profile, lock, facts and self-test give the same bytes. The script is ASCII only, and
    its code contains nothing from the profile except the name."""
    code = _SCRIPT.replace("NAME", loaded.name).replace("LOCK", locked.short)
    document = json.dumps(_document(loaded, locked), sort_keys=True)
    archive = base64.b64encode(selftest_job.selftest_zip()).decode()
    startup = [f"#* {line}\n" for line in _STARTUP.read_text(encoding="ascii").splitlines()]
    body = code + "".join([*_comments("#- ", document), *startup, *_comments("#+ ", archive)])
    return f"{body}#= {hashlib.sha256(body.encode()).hexdigest()}\n"


def _comments(mark: str, text: str) -> Iterator[str]:
    for start in range(0, len(text), 110):
        yield f"{mark}{text[start : start + 110]}\n"


def _document(loaded: LoadedProfile, locked: Lock) -> dict[str, object]:
    """Return the document for the self-test's `pretraining_environment_check.main`."""
    cards = [name for gpu in loaded.profile.gpus for name in database.gpus()[gpu].all_names]
    hardware = expected_hardware.expected_hardware(loaded.profile)
    expected = Expectations(plan_resolver.computing(locked.versions), locked.python, cards, hardware=hardware)
    selftest = selftest_job.on_host(loaded.profile.selftest)
    # the exported script does not contain the profile's own script, even if the profile requires it
    require = [name for name in selftest.require if name != selftest_job.OWN_SCRIPT]
    selftest = selftest.model_copy(update={"require": require})
    return {
        "profile": loaded.name,
        "lock": locked.short,
        "job": selftest_job.document(selftest, expected, RunRequest(level="quick")),
        "remedies": list(_remedies(loaded.name, cards)),
    }


_NO_GPU_CODE = r"no GPU is visible to torch .{1,60} \(built with no CUDA\)"


def _remedies(name: str, cards: Sequence[str]) -> Iterator[dict[str, object]]:
    """Yield the fixes in order of precedence: for results that match an advisory's signature, then for other
    failures."""
    for advisory in database.advisories():
        for signature in advisory.signature:
            when = {key: pattern.pattern for key, pattern in signature.items()}
            yield {"when": when, "remedy": f"{advisory.remedy} ({advisory.id})"}
    image = f"run in the image of {name} (envbuild make {name})"
    yield {"when": {"probe": "env.libs", "failure": "version"}, "remedy": f"{image}, or install the locked versions"}
    if cards:
        remedy = f"run on a whole GPU of one of these models: {', '.join(cards)}"
        yield {"when": {"probe": "env.identity", "status": "failed"}, "remedy": remedy}
        yield {"when": {"status": "skipped", "reason": _NO_GPU_CODE}, "remedy": f"{image}, or install the locked torch"}
    yield {
        "when": {"status": "skipped"},
        "remedy": "check that the driver works (nvidia-smi) and that its GPUs are visible here",
    }
    yield {"when": {}, "remedy": f"{image}, or find the difference: envbuild audit --python PATH --profile {name}"}
