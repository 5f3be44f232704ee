"""Stand-ins for Slurm's programs and the nodes' docker. The batch scripts really run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from envbuild.image.docker_engine import Image
from envbuild.runners.runner_interface import Watch
from envbuild.runners.slurm.slurm_runner import Slurm
from envbuild.runners.slurm.slurm_settings import SlurmSite
from envbuild.testrun.run_result import RawOutput
from envbuild.testrun.selftest_job import Job, Limits
from envbuild.util import user_folders
from unit.evidence.runs import NONCE, documents, lines

IMAGE = Image(f"sha256:{'1' * 64}", f"sha256:{'2' * 64}", (), {}, {}, 1)
JOB = Job(IMAGE.id, ("python",), b"the payload", NONCE, Limits(1 << 30, 30))
TIMES = "SubmitTime=2026-11-21T10:00:00 StartTime=2026-11-21T10:00:07"

SBATCH = """#!/bin/bash
for last; do :; done
[ ! -e "$STUB/refuse" ] || { echo "sbatch: error: Batch job submission failed: $(cat "$STUB/refuse")" >&2; exit 1; }
echo "$@" >"$STUB/submitted"
rm -f "$STUB/pid"
if [ ! -e "$STUB/hold" ]; then
    SLURM_JOB_ID=42 SLURMD_NODENAME=node-7 SLURM_JOB_GPUS=$(cat "$STUB/gpus" 2>/dev/null) \\
        setsid bash -c 'echo $$ >"$STUB/pid"; exec bash "$0"' "$last" >"$STUB/log" 2>&1 </dev/null &
    until [ -s "$STUB/pid" ]; do sleep 0.02; done # in a session of its own: what is left of ours is ended
fi
echo 42
"""
SCONTROL = """#!/bin/bash
[ ! -e "$STUB/down" ] || { echo "Unable to contact slurm controller (connect failure)" >&2; exit 1; }
[ ! -e "$STUB/forgotten" ] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
echo "JobId=42 JobName=x JobState=$(cat "$STUB/state") Reason=$(cat "$STUB/reason") Restarts=0 NodeList=node-7 $TIMES"
"""
SCANCEL = """#!/bin/bash
echo "$@" >"$STUB/cancelled"
kill -TERM "$(cat "$STUB/pid")"
"""
DOCKER = """#!/bin/bash
case $1 in
version) echo 26.1.5 ;;
image) [ ! -e "$STUB/no-image" ] && [ "$3" = "$(cat "$STUB/has")" ] ;;
pull) echo "dial tcp: connection refused" >&2; exit 1 ;;
inspect) if [ -e "$STUB/oom" ]; then echo true; else echo false; fi ;;
rm) echo "$@" >>"$STUB/removed" ;;
run)
    echo "$@" >"$STUB/ran"
    cat >"$STUB/stdin"
    cat "$STUB/frames"
    cat "$STUB/words" >&2
    [ ! -e "$STUB/hang" ] || exec sleep 60
    exit "$(cat "$STUB/code")"
    ;;
esac
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do
    SLURM_NODEID=$node SLURMD_NODENAME=node-$((7 + node)) "$@" &
done
wait
"""
IP = """#!/bin/bash
[ "${@: -1}" = ib0 ] && echo "7: ib0    inet 192.0.2.7/24 brd 192.0.2.255 scope global ib0"
"""


class Stub:
    """Stand-ins for Slurm's programs; files control what they do."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shared = folder / "stub", folder / "shared"
        self.folder.mkdir()
        self.notes: list[str] = []
        self.lines: list[bytes] = []
        for name, text in {"sbatch": SBATCH, "scontrol": SCONTROL, "scancel": SCANCEL, "docker": DOCKER,
                           "squeue": "#!/bin/sh\n", "srun": SRUN, "ip": IP}.items():  # fmt: skip
            (self.folder / name).write_text(text.replace("$TIMES", TIMES), encoding="utf-8")
            (self.folder / name).chmod(0o755)
        self.say(state="RUNNING", reason="None", has=IMAGE.id, words="", code="0")
        self.frames(b"".join(lines(documents())))

    def say(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name.replace("_", "-")).write_text(text, encoding="utf-8")

    def frames(self, stdout: bytes) -> None:
        (self.folder / "frames").write_bytes(stdout)

    def hang(self) -> None:
        """Let the container continue after its output. `head` passes on blocks of 4096 bytes."""
        self.say(hang="")
        self.frames(b"".join(lines(documents())).ljust(1 << 13, b"\n"))

    def recorded(self, name: str) -> str:
        file = self.folder / name
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def run(self, job: Job = JOB, site: SlurmSite | None = None, resume: str | None = None, **how: Any) -> RawOutput:
        self.notes.clear()
        self.lines.clear()
        # Seconds until a job without output counts as lost: few in a test that waits for this, many in all others.
        made = dataclasses.replace(site or SlurmSite(), folder=str(self.shared), grace=how.get("grace", 60))
        reference = how.get("reference")
        return Slurm(made, IMAGE, reference, "sample", resume).run(job, Watch(self.lines.append, self.notes.append))

    def left(self) -> list[Path]:
        return [*self.shared.glob("*"), *user_folders.state_folder("slurm").glob("*")]
