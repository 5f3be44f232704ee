"""Record the output of a command as a picture for the README.

python scripts/record_terminal.py FILE.svg COMMAND...       runs COMMAND and writes what it printed as an SVG
"""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 132


def main(file: Path, command: list[str]) -> int:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f"$ {shlex.join(command)}", style="bold"))
    console.print(Text.from_ansi(done.stdout))
    file.parent.mkdir(parents=True, exist_ok=True)
    # With a fixed id, the same output gives the same file. Without web fonts, the file needs no network.
    picture = console.export_svg(title=shlex.join(command), unique_id="terminal")
    start, end = picture.index("@font-face"), picture.rindex(".terminal-matrix {")
    file.write_text(picture[:start] + picture[end:], encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
