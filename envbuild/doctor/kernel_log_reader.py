"""Reads Xid errors from a machine's kernel log. Nothing is raised if the log is missing or cannot be read."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from envbuild.doctor.machine_readings import KernelLog, Xid, clean

MAX_LOG = 16 << 20  # bytes; the kernel's ring buffer is smaller unless configured larger
MAX_SECONDS = 1.0  # messages may arrive faster than they are read
MAX_XIDS = 200
_XID = re.compile(rb"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]{4,20})\): ([0-9]{1,4})(?![0-9])(?:,\s*([^\n]{0,400}))?")


def log(root: Path) -> KernelLog:
    """Returns the newest Xid errors in /dev/kmsg, which has the messages since the machine started."""
    try:
        handle = os.open(root / "dev" / "kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return KernelLog(fault=f"/dev/kmsg: {error.strerror}")
    try:
        records, partial = _records(handle)
        return KernelLog(tuple(parse_xids(records)), partial=partial)
    finally:
        os.close(handle)


def _records(handle: int) -> tuple[bytes, bool]:
    """Returns the newest 16 MiB of the log, and False. If MAX_SECONDS pass or a read fails before the end of the log,
    returns the newest 16 MiB of what was read, and True. Each read returns one record of /dev/kmsg, or the next 64 KiB
    of a plain file."""
    found = bytearray()
    partial = True
    end = time.monotonic() + MAX_SECONDS
    while time.monotonic() < end:
        try:
            record = os.read(handle, 64 << 10)
        except BlockingIOError:  # no more records yet
            partial = False
            break
        except BrokenPipeError:  # the record was overwritten: the next read continues after it
            continue
        except OSError:
            break
        if not record:
            partial = False
            break
        found += record
        if len(found) >= 2 * MAX_LOG:  # not after each record, because it moves 16 MiB
            del found[:-MAX_LOG]
    return bytes(found[-MAX_LOG:]), partial


def parse_xids(text: bytes) -> list[Xid]:
    """Returns the Xid errors in a kernel log of any format, the oldest first. Of more than 200, only the newest 200."""
    found = [
        Xid(int(number), gpu.decode(), clean(words.decode("utf-8", "replace")))
        for gpu, number, words in _XID.findall(text)
    ]
    return found[-MAX_XIDS:]
