"""Backs up the files of an environment's distributions before they are replaced, and restores them.

The backup is a folder of hard links in the environment. It needs no space until a file is replaced. A restored file is
the original one, which still shares its content with caches and other environments. Where links are not possible, files
are copied. Bytecode in `__pycache__` is not kept.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import hashlib
import os
import re
import shlex
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from pydantic import BaseModel, ConfigDict, ValidationError

from envbuild.util import atomic_files, temporary_files
from envbuild.util.errors import FileError, HashMismatch

FOLDER = ".envbuild-fix"
PROJECT_FILES = ("pyproject.toml", "uv.lock")
_MANIFEST, _FILES, _CACHE = "backup.json", "files", "__pycache__"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)


class KeptFile(_Model):
    """A file as it was before the changes. `number`: its name in the backup; `sha256`: set after the changes."""

    path: str
    number: int
    size: int
    modified: int
    sha256: str | None = None


class Backup(_Model):
    """What a backup contains. `files`: by the name of a distribution's `.dist-info` folder, or "" for other files;
    `done`: the changes are complete, and only changed distributions are left in the backup; `added`: the files that the
    changes added; `project`: the sha256 of each changed project file after the changes."""

    version: int = 1
    prefix: str
    sites: list[str]
    done: bool = False
    files: dict[str, list[KeptFile]]
    added: list[str] = []
    project: dict[str, str] = {}

    @property
    def names(self) -> frozenset[str]:
        """The distributions of the backup, by normalized name."""
        return frozenset(name_in_dist_info(info) for info in self.files if info)


@dataclass(frozen=True)
class BackupFolder:
    """A backup on disk."""

    folder: Path
    content: Backup

    def kept(self, file: KeptFile) -> Path:
        return self.folder / _FILES / str(file.number)

    @property
    def bytes(self) -> int:
        """The disk space that only the backup uses: the size of the kept files that have no hard link elsewhere."""
        rows = (self.kept(file).lstat() for files in self.content.files.values() for file in files)
        return sum(row.st_size for row in rows if row.st_nlink == 1)


def distribution_files(prefix: Path, sites: Iterable[str]) -> dict[str, list[Path]]:
    """The files of each installed distribution, by the name of its `.dist-info` folder: the files that its RECORD
    lists, and all files in the `.dist-info` folder. Files outside the environment and bytecode are left out.
    `sites`: real paths; `prefix` may lead through symbolic links."""
    prefix = Path(os.path.realpath(prefix))
    found: dict[str, list[Path]] = {}
    for site in map(Path, sites):
        for info in sorted(site.glob("*.dist-info")):
            rows = [*_recorded(info / "RECORD", site), *(path for path in info.rglob("*") if not path.is_dir())]
            paths = {Path(os.path.normpath(path)) for path in rows}
            found.setdefault(info.name, []).extend(
                sorted(path for path in paths if path.is_relative_to(prefix) and _CACHE not in path.parts)
            )
    return found


def _recorded(record: Path, site: Path) -> Iterator[Path]:
    try:
        text = record.read_text(encoding="utf-8", errors="surrogateescape")
        yield from (site / row[0] for row in csv.reader(text.splitlines()) if row and row[0] and "\0" not in row[0])
    except (OSError, csv.Error):
        return


def take_backup(
    prefix: Path,
    sites: Iterable[str],
    others: Iterable[Path] = (),
    touched: frozenset[str] = frozenset(),
    project: Iterable[Path] = (),
) -> BackupFolder:
    """Keep the files of all distributions of an environment, the files in its package folders and `bin` that no
    distribution owns (an installation may overwrite them), the files `others` (such as leftovers), and the files
    `project`. These are copied, not linked, because uv changes them in place. Where links are not possible, only
    `others`, `project` and the distributions in `touched` are kept, as copies.

    Raises FileError if an earlier change was interrupted.
    """
    sites = list(sites)
    open_backup = latest_backup(prefix)
    if open_backup and not open_backup.content.done:
        raise FileError(
            f"an earlier fix of {prefix} was interrupted", hint=f"restore its files first: {undo_command(prefix)}"
        )
    number = int(open_backup.folder.name) + 1 if open_backup else 1
    prefix = Path(os.path.realpath(prefix))
    folder = prefix / FOLDER / f"{number:04}"
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    with temporary_files.folder("backup", folder.parent) as made:
        (made / _FILES).mkdir()
        listed = distribution_files(prefix, sites)
        copied = [Path(os.path.abspath(path)) for path in project]  # noqa: PTH100 - do not resolve links
        asked = [Path(os.path.abspath(path)) for path in others]  # noqa: PTH100
        listed[""] = [*copied, *asked, *_unowned(prefix, sites, {**listed, "": [*copied, *asked]})]
        count, files, numbers = 0, dict[str, list[KeptFile]](), dict[Path, KeptFile]()
        for info, paths in listed.items():
            files[info] = []
            for path in paths:
                if path not in numbers:
                    target = made / _FILES / str(count)
                    may_copy = name_in_dist_info(info) in touched if info else path in asked
                    kept = _keep(path, target, count, path not in copied, may_copy or path in copied)
                    if kept is None:
                        continue
                    numbers[path] = kept
                    count += 1
                files[info].append(numbers[path])
        content = Backup(prefix=str(prefix), sites=list(sites), files=files)
        atomic_files.write_atomically(made / _MANIFEST, content.model_dump_json())
        made.rename(folder)
    return BackupFolder(folder, content)


def _unowned(prefix: Path, sites: Iterable[str], owned: Mapping[str, Iterable[Path]]) -> list[Path]:
    """The files in the package folders and in `bin` that no distribution owns, except bytecode."""
    known = {path for paths in owned.values() for path in paths}
    found = set()
    for top in (*map(Path, sites), prefix / "bin"):
        for root, folders, names in os.walk(top):
            folders[:] = [name for name in folders if name != _CACHE]
            found |= {Path(root, name) for name in names}
    return sorted(found - known)


def _keep(path: Path, target: Path, number: int, may_link: bool, may_copy: bool) -> KeptFile | None:
    """Link a file into the backup if `may_link`, else copy it if `may_copy`. Return None if `path` is neither a regular
    file nor a symbolic link, or if it can be neither linked nor copied."""
    try:
        about = path.lstat()
    except OSError:
        return None
    if not (stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode)):
        return None
    linked = False
    if may_link:
        with contextlib.suppress(OSError):
            os.link(path, target, follow_symlinks=False)
            linked = True
    if not linked:
        if not may_copy:
            return None
        shutil.copy2(path, target, follow_symlinks=False)
    return KeptFile(path=str(path), number=number, size=about.st_size, modified=about.st_mtime_ns)


def finish_backup(backup: BackupFolder, project: Iterable[Path] = ()) -> BackupFolder:
    """Complete a backup after the changes: keep only the distributions that changed, and the changed files that belong
    to no distribution. Record the checksums of the kept files, and list the added files."""
    content, prefix, differs = backup.content, Path(backup.content.prefix), backup_differs(backup)
    changed = _changed_distributions(content, differs)
    # a file that is still the same one cannot be restored: a different program wrote into it
    changed[""] = [
        file for file in content.files.get("", ()) if differs(file) and not _is_same_file(backup.kept(file), file.path)
    ]
    names = {name_in_dist_info(info) for info in changed if info}
    others = {file.path for file in changed[""]}
    before = {file.path for files in content.files.values() for file in files}
    now = distribution_files(prefix, content.sites)
    added = {
        str(path)
        for info, paths in now.items()
        if info not in content.files or name_in_dist_info(info) in names
        for path in paths
    }
    hashed = {
        info: [file.model_copy(update={"sha256": _sha256(backup.kept(file))}) for file in files]
        for info, files in changed.items()
    }
    done = content.model_copy(
        update={
            "done": True,
            "files": hashed,
            "added": sorted(added - before),
            "project": {str(path): _sha256(path) for path in project if str(path) in others and path.is_file()},
        }
    )
    atomic_files.write_atomically(backup.folder / _MANIFEST, done.model_dump_json())
    left = {file.number for files in hashed.values() for file in files}
    for file in (file for files in content.files.values() for file in files if file.number not in left):
        backup.kept(file).unlink(missing_ok=True)
    return BackupFolder(backup.folder, done)


def _changed_distributions(content: Backup, differs: Callable[[KeptFile], bool]) -> dict[str, list[KeptFile]]:
    """The distributions with a changed file. NVIDIA's wheels share files, such as nvidia/__init__.py: a changed file
    that several own counts only for owners with a changed file of their own, or for all if none has one."""
    owners = Counter(file.number for info, files in content.files.items() if info for file in files)
    changed = {info: [file for file in files if differs(file)] for info, files in content.files.items() if info}
    names = {info for info, files in changed.items() if any(owners[file.number] == 1 for file in files)}
    counted = {file.number for info in names for file in changed[info]}
    names |= {info for info, files in changed.items() if any(file.number not in counted for file in files)}
    return {info: content.files[info] for info in content.files if info in names}


def backup_differs(backup: BackupFolder) -> Callable[[KeptFile], bool]:
    """Return a function that checks whether a file of the environment differs from its copy in the backup."""

    def differs(file: KeptFile) -> bool:
        try:
            now, then = Path(file.path).lstat(), backup.kept(file).lstat()
        except OSError:
            return True
        same = os.path.samestat(now, then) or (now.st_size, now.st_mtime_ns) == (file.size, file.modified)
        return not same or (then.st_size, then.st_mtime_ns) != (file.size, file.modified)

    return differs


def _is_same_file(kept: Path, path: str) -> bool:
    try:
        return os.path.samestat(kept.lstat(), Path(path).lstat())
    except OSError:
        return False


def written_into(backup: BackupFolder, others: Iterable[Path] = ()) -> list[str]:
    """The paths of files that a command changed in place instead of replacing them: files of distributions, and
    `others`, as given to take_backup. Such a change also changes the hard link in the backup. Files that no
    distribution owns do not count: a running program may write into them, for example logs."""
    asked = {os.path.abspath(path) for path in others}  # noqa: PTH100 - do not resolve links
    files = {
        file.number: file
        for info, files in backup.content.files.items()
        for file in files
        if info or file.path in asked
    }
    kept = ((file, backup.kept(file).lstat()) for file in files.values() if os.path.lexists(backup.kept(file)))
    return sorted(file.path for file, now in kept if (now.st_size, now.st_mtime_ns) != (file.size, file.modified))


def latest_backup(prefix: Path) -> BackupFolder | None:
    """The newest backup of an environment. Raises FileError if it cannot be read."""
    names = (path for path in (prefix / FOLDER).glob("[0-9]*") if re.fullmatch(r"\d{4,9}", path.name))
    folder = max(names, key=lambda path: int(path.name), default=None)
    if folder is None:
        return None
    try:
        content = Backup.model_validate_json((folder / _MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        raise FileError(f"{folder / _MANIFEST} cannot be read", hint="its files are in the same folder") from error
    _require_inside(content, prefix, folder / _MANIFEST)
    return BackupFolder(folder, content)


def _require_inside(content: Backup, prefix: Path, manifest: Path) -> None:
    """Raise FileError if a backup would change files outside the environment: another user may have written the
    backup."""
    project = prefix.parent.resolve()
    allowed = {file for name in PROJECT_FILES for file in (project / name, (project / name).resolve())}
    paths = [*(file.path for files in content.files.values() for file in files), *content.added, *content.project]
    for text in [*paths, *content.sites, content.prefix]:
        # resolve links in the folder; if the file is a link, the link itself is replaced, not its target
        real = Path(text).parent.resolve() / Path(text).name
        expected = real in allowed or real.is_relative_to(prefix.resolve())
        if not expected or Path(os.path.normpath(text)) != Path(text):
            raise FileError(
                f"{manifest}: {text} is not a file of this environment",
                hint="the backup was made for a different environment, or was changed",
            )


@dataclass(frozen=True)
class Restoration:
    """What was restored: distributions, and files of the project. `left`: the project files that were not restored,
    because they changed after the repair."""

    distributions: frozenset[str]
    project: tuple[str, ...]
    left: tuple[str, ...]


def restore(backup: BackupFolder) -> Restoration:
    """Restore every file of the changed distributions and the changed files that belong to no distribution, remove the
    files that the changes added, and delete the backup. The backup stays if a project file is not restored.

    Raises HashMismatch, before anything is restored, if a file in the backup has changed.
    """
    if not backup.content.done:
        backup = finish_backup(backup)
    content, prefix = backup.content, Path(backup.content.prefix)
    kept = [file for files in content.files.values() for file in files]
    for file in kept:
        path = backup.kept(file)
        if os.path.lexists(path) and _sha256(path) != file.sha256:
            raise HashMismatch(
                f"{path}, the backup of {file.path}, has changed",
                hint="restore the file by hand, or install its package again",
            )
    before = {file.path for file in kept}
    now = distribution_files(prefix, content.sites)
    current = {str(path) for info, paths in now.items() if name_in_dist_info(info) in content.names for path in paths}
    others = {
        str(path) for info, paths in now.items() if name_in_dist_info(info) not in content.names for path in paths
    }
    brought = {
        name_in_dist_info(Path(path).parent.name) for path in content.added if path.endswith(".dist-info/METADATA")
    }
    others -= {str(path) for info, paths in now.items() if name_in_dist_info(info) in brought for path in paths}
    for name in sorted((current | set(content.added)) - before - others):
        Path(name).unlink(missing_ok=True)
        _remove_empty(Path(name).parent, prefix)
    left = [
        path for path, sha256 in content.project.items() if not Path(path).is_file() or _sha256(Path(path)) != sha256
    ]
    for file in kept:
        if file.path not in left and os.path.lexists(backup.kept(file)):
            Path(file.path).parent.mkdir(parents=True, exist_ok=True)
            _move(backup.kept(file), file.path)
    if not left:
        shutil.rmtree(backup.folder)
        with contextlib.suppress(OSError):
            backup.folder.parent.rmdir()
    return Restoration(content.names, tuple(path for path in content.project if path not in left), tuple(left))


def _move(kept: Path, path: str) -> None:
    """Move a file from the backup to its place. A link in the project may lead to a different disk."""
    try:
        kept.replace(path)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copy2(kept, path, follow_symlinks=False)


def _remove_empty(folder: Path, prefix: Path) -> None:
    """Remove this folder if it contains nothing but bytecode, then likewise the folders above it, up to the
    environment's own folder."""
    while folder != prefix and folder.is_relative_to(prefix):
        try:
            entries = {entry.name for entry in folder.iterdir()}
            if entries - {_CACHE}:
                return
            if entries:
                shutil.rmtree(folder / _CACHE)
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


def undo_command(prefix: Path) -> str:
    return shlex.join(["envbuild", "fix", "--python", str(prefix), "--undo"])


def name_in_dist_info(info: str) -> str:
    """The normalized distribution name in the name of a `.dist-info` folder."""
    return canonicalize_name(info.removesuffix(".dist-info").partition("-")[0])


def _sha256(path: Path) -> str:
    """The sha256 of a file's content, or of a symbolic link's target path."""
    if path.is_symlink():
        return hashlib.sha256(os.fsencode(path.readlink())).hexdigest()
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def file_sizes(files: Mapping[str, Iterable[Path]], names: frozenset[str]) -> int:
    """The total size of the files of the distributions in `names`, in bytes."""
    paths = {path for info, listed in files.items() if name_in_dist_info(info) in names for path in listed}
    return sum(path.lstat().st_size for path in paths if os.path.lexists(path))
