"""Small wheels with any content, and hostile changes of their bytes."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@dataclass(frozen=True)
class Item:
    """A member: content, mode with file type, and compression. `system`: 3 for Unix, 0 for DOS."""

    content: bytes = b""
    mode: int = 0o100644
    method: int = DEFLATED
    system: int = 3


Files = Mapping[str, bytes | Item]


def digest(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def odd_wheel(
    folder: Path,
    files: Files,
    *,
    name: str = "odd",
    entry_points: str | None = None,
    record: str | None = None,
    more_rows: Sequence[str] = (),
    unlisted: Sequence[str] = (),
    wheel: str | None = WHEEL,
    inner: str | None = None,
    record_mode: int = 0o100644,
    metadata: str = "",
) -> Path:
    """Write NAME-1.0-py3-none-any.whl. `record`: the whole RECORD; None: a RECORD with a row for each file that is not
    in `unlisted`, and with `more_rows`. `inner`: another name of the .dist-info folder."""
    info = f"{inner or f'{name}-1.0'}.dist-info"
    items = {path: value if isinstance(value, Item) else Item(value) for path, value in files.items()}
    items[f"{info}/METADATA"] = Item(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{metadata}".encode())
    if wheel is not None:
        items[f"{info}/WHEEL"] = Item(wheel.encode())
    if entry_points is not None:
        items[f"{info}/entry_points.txt"] = Item(entry_points.encode())
    if record is None:
        listed = {path: item for path, item in items.items() if not path.endswith("/") and path not in unlisted}
        rows = [f"{_quoted(path)},{digest(item.content)},{len(item.content)}" for path, item in listed.items()]
        record = "".join(f"{row}\n" for row in (*rows, *more_rows, f"{info}/RECORD,,"))
    items[f"{info}/RECORD"] = Item(record.encode(), record_mode)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-1.0-py3-none-any.whl"
    file.write_bytes(zipped(items))
    return file


def zipped(items: Mapping[str, Item]) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        for path, item in items.items():
            member = zipfile.ZipInfo(path)
            member.create_system, member.compress_type = item.system, item.method
            member.external_attr = item.mode << 16 | (0x10 if path.endswith("/") else 0)
            archive.writestr(member, item.content)
    return raw.getvalue()


def _quoted(path: str) -> str:
    return '"' + path.replace('"', '""') + '"' if set(path) & set(',"') else path


MODES = (0, 0o644, 0o100600, 0o100755, 0o100711, 0o100010, 0o100001, 0o104755, 0o102755, 0o100666, 0o100777)
_DATA = "odd-1.0.data"
_SHEBANGS = {
    "a": b"#!python\nprint(1)\n",
    "b": b"#!pythonw\nprint(1)\n",
    "c": b"#!python -E\nprint(1)\n",
    "d": b"#!python\r\nprint(1)\r\n",
    "e": b"#!/usr/bin/env python\nprint(1)\n",
    "f": b"\x7fELF\0\0",
    "g": b"#!python3\nprint(1)\n",
    "h": b"#!python",
    "i": b"",
    "j.py": b"#!pythonx\n",
    "k": b"#!pytho",
}

ODD: dict[str, dict[str, object]] = {
    "scripts": {"files": {f"{_DATA}/scripts/{name}": Item(text) for name, text in _SHEBANGS.items()}},
    "a stored script": {"files": {f"{_DATA}/scripts/a": Item(b"#!python\nx", method=STORED)}},
    "modes": {"files": {f"odd/m{mode:o}": Item(b"%o" % mode, mode) for mode in MODES}},
    "modes of DOS": {"files": {"odd/x": Item(b"1", 0o755, system=0), "odd/y": Item(b"1", 0, system=0)}},
    "folders": {
        "files": {
            "odd/e/": Item(mode=0o40700, method=STORED),
            "odd/f/g/": Item(mode=0, method=STORED),
            f"{_DATA}/data/": Item(mode=0o40755, method=STORED),
            f"{_DATA}/data/empty/": Item(mode=0o40755, method=STORED),
            f"{_DATA}/scripts/": Item(mode=0o40755, method=STORED),
        }
    },
    "the environment's own folders": {
        "files": {
            f"{_DATA}/data/{folder}/": Item(mode=0o40755, method=STORED)
            for folder in ("lib64", "lib", "bin", "include", "lib/python3.11/site-packages", "lib64/python3.11")
        }
    },
    "data": {
        "files": {
            f"{_DATA}/purelib/odd/p.py": b"p",
            f"{_DATA}/platlib/odd/q.so": Item(b"q", 0o100755),
            f"{_DATA}/data/etc/x.conf": b"c",
            f"{_DATA}/data/bin/tool": Item(b"#!python\n", 0o100755),
            f"{_DATA}/data/bin/sub/tool": b"x",
            f"{_DATA}/data/lib/python3.11/site-packages/sneak.py": b"s",
            f"{_DATA}/data/lib64/x": b"x",
            f"{_DATA}/data/lib64/python3.11/site-packages/y.py": b"y",
            f"{_DATA}/headers/sub/i.h": b"h",
            "other-1.0.data/purelib/x": b"x",
        }
    },
    "names": {
        "files": {
            "odd/a,b.txt": b"1",
            'odd/q"q.txt': b"1",
            "odd/é.txt": b"1",
            "odd/with space.txt": b"1",
            "odd/Z.txt": b"1",
            "odd/__pycache__/x.cpython-311.pyc": b"1",
            "odd-b/x": b"1",
            f"odd/{'long' * 30}/{'n' * 120}": b"1",
            f"odd/{'ü' * 60}": b"1",
            "bin/inside": b"1",
        }
    },
    "stored and empty": {
        "files": {
            "odd/s": Item(b"x" * 200_000, method=STORED),
            "odd/z": Item(b"", method=STORED),
            "odd/d": Item(b""),
            "odd/block": Item(b"x" * 65535, method=STORED),
        }
    },
    "a link": {"files": {"odd/a.py": b"1", "odd/l": Item(b"a.py", 0o120777, STORED)}},
    "metadata of installers": {
        "files": {
            "odd-1.0.dist-info/INSTALLER": b"pip\n",
            "odd-1.0.dist-info/REQUESTED": b"",
            "odd-1.0.dist-info/direct_url.json": b"{}",
            "odd-1.0.dist-info/RECORD.jws": b"x",
        }
    },
    "RECORD with ghosts": {
        "files": {"odd/a.py": b"1", "odd/b.py": b"2"},
        "unlisted": ["odd/b.py"],
        "more_rows": ["odd/ghost.py,sha256=x,1", "odd-1.0.dist-info/RECORD.jws,,"],
    },
    "RECORD with slashes": {
        "files": {"odd/a.py": b"1"},
        "unlisted": ["odd/a.py"],
        "more_rows": [f"/odd/a.py,{digest(b'1')},1", f"./odd/a.py,{digest(b'1')},1"],
    },
    "RECORD with CRLF": {"files": {"odd/a.py": b"1"}, "record": f"odd/a.py,{digest(b'1')},1\r\n\r\n"},
    "empty RECORD": {"files": {"odd/a.py": b"1"}, "record": ""},
    "executable RECORD": {"files": {"odd/a.py": b"1"}, "record_mode": 0o100755},
    "entry points": {
        "files": {"odd.py": b""},
        "entry_points": "[console_scripts]\r\n A-b=odd:main\r\nc\t= odd.mod : Cls.meth [e1,e2]\n# com = x:y\n;x\n\n"
        "x y = odd:f\nuni\u00e9 = odd.a.b:c.d.e\n[gui_scripts]\ng=odd:gui\n[other]\nx=junk\n",
    },
    "a Wheel-Version of later": {"files": {}, "wheel": WHEEL.replace("1.0", "1.9")},
    "capitals": {"files": {"Odd-1.0.data/headers/h.h": b"h"}, "inner": "Odd-1.0"},
    "another spelling of its version": {"files": {"odd.py": b""}, "inner": "odd-1.0.0"},
    "pip": {
        "name": "pip",
        "files": {"pip/__init__.py": b""},
        "entry_points": "[console_scripts]\npip = pip:main\npip3 = pip:main\npip3.14 = pip:main\n",
    },
}
"""Arguments of odd_wheel for wheels that both uv and envbuild install."""

REFUSED_BY_BOTH: dict[str, dict[str, object]] = {
    **{
        f"the entry point {line!r}": {"files": {}, "entry_points": f"[console_scripts]\n{line}\n"}
        for line in ("x = odd", "x = odd:f # c", "x : odd:f", "x", "a/x = odd:f", "x = odd:", "x = odd:a:b", "[",
                     "x = odd:f\nx = odd:g", "x =\n  odd:f", "x = odd:f\n y = odd:g",
                     "x = odd:f []", "python3 = odd:f", "Python = odd:f")
    },
    "a second section": {"files": {}, "entry_points": "[console_scripts]\nx=a:b\n[console_scripts]\ny=a:b\n"},
    "an option before a section": {"files": {}, "entry_points": "x=a:b\n"},
    "a folder in scripts": {"files": {f"{_DATA}/scripts/sub/x": b""}},
    "an empty folder in scripts": {"files": {f"{_DATA}/scripts/sub/": Item(method=STORED)}},
    "a reserved script": {"files": {f"{_DATA}/scripts/python3.11": b""}},
    "an unknown scheme": {"files": {f"{_DATA}/foo/x": b""}},
    "no WHEEL": {"files": {}, "wheel": None},
    "another format": {"files": {}, "wheel": WHEEL.replace("1.0", "2.0")},
    "another name inside": {"files": {}, "inner": "other-1.0"},
    "two .dist-info folders": {"files": {"other-1.0.dist-info/METADATA": b""}},
    "a file that is a folder": {"files": {"odd/a": b"", "odd/a/b": b""}},
    **{
        f"a file at {path}": {"files": {f"{_DATA}/data/{path}": b""}}
        for path in ("bin", "lib", "lib/python3.11/site-packages", "bin/python/x",
                     "bin/python3.11/x", "pyvenv.cfg/x", "bin/activate/x", "lib64/python3.11")
    },
    **{
        f"a folder at {path}": {"files": {f"{_DATA}/data/{path}/": Item(mode=0o40755, method=STORED)}}
        for path in ("bin/python", "pyvenv.cfg", "bin/activate")
    },
    "two columns": {"files": {}, "record": "a,b,c\na,b\n"},
    "a size in words": {"files": {}, "record": "a,,x\n"},
}  # fmt: skip

REFUSED_BY_US: dict[str, tuple[dict[str, object], str]] = {
    "a wrong hash in RECORD": (
        {"files": {"odd/a.py": b"1"}, "unlisted": ["odd/a.py"], "more_rows": [f"odd/a.py,{digest(b'2')},1"]},
        "'odd/a.py': sha256 6b86b273",
    ),
    "a wrong hash of a script": (
        {
            "files": {f"{_DATA}/scripts/x": b"#!python\n"},
            "unlisted": [f"{_DATA}/scripts/x"],
            "more_rows": [f"{_DATA}/scripts/x,{digest(b'2')},1"],
        },
        "scripts/x': sha256",
    ),
    "an md5 in RECORD": (
        {"files": {"odd/a.py": b"1"}, "unlisted": ["odd/a.py"], "more_rows": ["odd/a.py,md5=AAAA,1"]},
        "no valid sha256",
    ),
    "a script and an entry point of one name": (
        {"files": {f"{_DATA}/scripts/x": b"#!python\n"}, "entry_points": "[console_scripts]\nx = a:b\n"},
        "bin/x is installed twice",
    ),
    "two entry points of one name": (
        {"files": {}, "entry_points": "[console_scripts]\nx = a:b\n[gui_scripts]\nx = a:c\n"},
        "bin/x is installed twice",
    ),
    "two members for one path": (
        {"files": {"odd/a.py": b"1", f"{_DATA}/purelib/odd/a.py": b"2"}},
        "odd/a.py is installed twice",
    ),
    "a configuration of the environment": (
        {"files": {f"{_DATA}/data/pyvenv.cfg": b""}},
        "pyvenv.cfg is a part of the environment",
    ),
    **{
        f"a file at {path}": ({"files": {f"{_DATA}/data/{path}": b""}}, f"{found} is a part of the environment")
        for path, found in (("lib64", "lib"), ("include", "include"))
    },
    "an interpreter by another name": (
        {"files": {f"{_DATA}/scripts/python2": b""}},
        "bin/python2 is a part of the environment",
    ),
}
