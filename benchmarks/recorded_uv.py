"""Records the calls of uv that `envbuild lock` makes, and repeats them without envbuild."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from envbuild.cli.lock import PARALLEL

# Runs envbuild with a program in place of uv. `uv_binary` is the only place where envbuild looks uv up.
_ENVBUILD = (
    "import pathlib, sys; from envbuild.fetch import wheel_resolution_and_download as wheels; "
    "uv = pathlib.Path(sys.argv.pop(1)); wheels.uv_binary = lambda: uv; "
    "from envbuild.cli.entry import main; main()"
)
# Keeps the files that the arguments name, because envbuild removes them after the call.
_RECORDER = """#!{python}
import json, os, pathlib, shutil, subprocess, sys, tempfile
kept = pathlib.Path(tempfile.mkdtemp(dir={folder!r}))
argv = [{uv!r}]
for one in sys.argv[1:]:
    if os.path.isabs(one) and os.path.isfile(one) and one != {python!r}:
        one = shutil.copy(one, kept / f"{{len(argv)}}-{{os.path.basename(one)}}")
    argv.append(str(one))
stdin, variables = sys.stdin.read(), {{**os.environ, "TMPDIR": str(kept)}}
(kept / "call.json").write_text(json.dumps([argv, stdin, variables]))
sys.exit(subprocess.run([{uv!r}, *sys.argv[1:]], input=stdin, text=True).returncode)
"""


def recording(uv: Path, folder: Path) -> tuple[str, ...]:
    """Return the start of a command that runs envbuild and records each call of uv in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "calls").mkdir(parents=True)
    recorder = folder / "uv"
    text = _RECORDER.format(python=sys.executable, folder=str(folder / "calls"), uv=str(uv))
    recorder.write_text(text, encoding="utf-8")
    recorder.chmod(0o755)
    return (sys.executable, "-c", _ENVBUILD, str(recorder))


def repeated(folder: Path) -> tuple[float, int]:
    """Repeat the recorded calls, as many at a time as `envbuild lock` computes locks. Return the seconds and the number
    of calls. Raises SystemExit without a recorded call, and if all of them fail."""
    files = sorted(folder.glob("calls/*/call.json"))
    if not files:
        raise SystemExit("no call of uv was recorded")

    def repeat(file: Path) -> int:
        argv, stdin, variables = json.loads(file.read_text(encoding="utf-8"))
        done = subprocess.run(argv, input=stdin, text=True, cwd=file.parent, env=variables, capture_output=True)
        return done.returncode

    begin = time.perf_counter()
    with ThreadPoolExecutor(PARALLEL) as pool:
        codes = list(pool.map(repeat, files))
    took = time.perf_counter() - begin
    if all(codes):
        raise SystemExit(f"each of the {len(files)} recorded calls of uv fails")
    return took, len(files)
