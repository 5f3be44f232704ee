"""A second clone gives the same image in a different folder, with a different clock, user, locale and time zone."""

from __future__ import annotations

import datetime
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from envbuild.lock import lock_file

from .registries import unpacked
from .support import Project, Proved, burdened, command, holding, in_layers

pytestmark = pytest.mark.engine

UID, DAYS = 4242, 400
SECRET = secrets.token_hex(16)
SOCKET = Path("/var/run/docker.sock")

# Runs a command in separate namespaces: as a user that this machine does not have, with a range of user ids for
# mmdebstrap, and with its own /dev/shm, where libfaketime keeps files by process id. The process ids start above those
# of mmdebstrap's inner namespace, because both use the same file names. $1: a scratch folder; the rest: the command.
AS_SOMEBODY = f"""set -e
echo 60000 > /proc/sys/kernel/ns_last_pid
mount -t tmpfs tmpfs /dev/shm
chmod 1777 /dev/shm
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work"
mount -t overlay -o "lowerdir=/etc,upperdir=$1/upper,workdir=$1/work" overlay /etc
echo "other_user:x:{UID}:{UID}::/:/bin/sh" >> /etc/passwd
echo "other_user:x:{UID}:" >> /etc/group
echo "other_user:100000:65536" > /etc/subuid
echo "other_user:100000:65536" > /etc/subgid
shift
exec setpriv --reuid {UID} --regid {UID} --groups "$(stat -L -c %g {SOCKET})" \\
    --inh-caps=+dac_read_search --ambient-caps=+dac_read_search "$@"
"""


@dataclass(frozen=True)
class OtherUser:
    """Runs commands as a separate user whose clock is `DAYS` days behind. This user may read everything (the Python
    that runs the test may be in another user's home) and owns nothing but its project."""

    scratch: Path
    environment: dict[str, str]

    def run(self, *argv: str | Path, cwd: Path) -> str:
        inside = ["env", "-i", *(f"{key}={value}" for key, value in self.environment.items()), *argv]
        unshare = ("unshare", "--mount", "--pid", "--fork", "--mount-proc")
        return command(*unshare, "sh", "-c", AS_SOMEBODY, "sh", self.scratch, *inside, cwd=cwd)


@pytest.fixture
def other_user(workplace: Path, scratch: Path) -> OtherUser:
    if os.geteuid() != 0 or not SOCKET.is_socket():
        pytest.skip("only root can run as another user, and the engine must listen on its usual socket")
    faketime = unpacked(workplace, "libfaketime")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if not shutil.which("newuidmap"):
        path = f"{path}{os.pathsep}{unpacked(workplace, 'uidmap')}/usr/bin"
    (library,) = faketime.glob("usr/lib/*/faketime/libfaketime.so.1")
    home = scratch / "clone"
    home.mkdir()
    # NO_FAKE_STAT: files keep the times that they have
    clock = {"LD_PRELOAD": str(library), "FAKETIME": f"-{DAYS}d", "NO_FAKE_STAT": "1"}
    started = shutil.which("mmdebstrap")
    if started:  # envbuild gives it no variables of the user
        programs = scratch / "programs"
        programs.mkdir()
        wrapper = programs / "mmdebstrap"
        exports = " ".join(f"{key}={shlex.quote(value)}" for key, value in clock.items())
        wrapper.write_text(f'#!/bin/sh\nexport {exports}\nexec {started} "$@"\n', encoding="utf-8")
        wrapper.chmod(0o755)
        path = f"{programs}{os.pathsep}{path}"
    environment = {
        "PATH": path, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(home), "XDG_STATE_HOME": f"{home}/state", "XDG_CONFIG_HOME": f"{home}/config",
        "XDG_CACHE_HOME": f"{home}/cache", "DOCKER_HOST": f"unix://{SOCKET}",
        "TZ": "Pacific/Kiritimati", "LC_ALL": "C", "LANG": "C", "USER": "other_user", "LOGNAME": "other_user",
        **burdened(home, SECRET), "ENVBUILD_KEY_PASSPHRASE": SECRET, **clock,
    }  # fmt: skip
    made = OtherUser(scratch / "etc", environment)
    made.scratch.mkdir()
    try:
        output = made.run("sh", "-c", "id -u; date +%s", cwd=Path("/"))
    except AssertionError as error:
        pytest.skip(f"this machine lets nobody have namespaces: {str(error).strip().splitlines()[-1]}")
    uid, seconds = map(int, output.split())
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=DAYS)
    assert uid == UID
    assert abs(seconds - then.timestamp()) < 300
    return made


def test_another_clone_with_another_clock_user_and_locale_gives_the_same_image(
    light: Proved, other_user: OtherUser, scratch: Path, run_id: str
) -> None:
    """The base is also built again, by mmdebstrap without root, and every layer without the builder's cache. The clone
    has different secrets, which must not appear anywhere."""
    name, clone = f"e2e-clone-{run_id}", Project.create(scratch / "clone")
    shutil.copy(light.project.profile(light.name), clone.profile(name))
    shutil.copy(light.project.lock(light.name), clone.lock(name))
    locked = lock_file.read(clone.lock(name))
    assert locked
    files = [("wheels", item.wheel.sha256) for item in locked.wheels]
    files += [("debs", deb.sha256) for deb in (*locked.base, *locked.apt)]
    for kind, sha256 in files:
        shutil.copytree(light.project.cached(kind) / sha256, scratch / "clone" / "cache" / "envbuild" / kind / sha256)
    subprocess.run(["chown", "-R", f"{UID}:{UID}", scratch / "clone"], check=True)
    wanted = ("build", name, "--no-cache", "--locked")
    result = other_user.run(sys.executable, "-m", "envbuild", *wanted, cwd=clone.folder)
    assert result.splitlines()[-1] == f"built {light.id}"
    assert SECRET not in result
    assert holding(SECRET, clone.folder, clone.state) == []
    assert not in_layers(f"envbuild/{name}:{locked.short}", [SECRET.encode()])
    assert (scratch / "clone" / "cache" / "envbuild" / "bases").stat().st_uid == UID
