"""Reads Xid errors from a machine's kernel log. Nothing is raised if the log is missing or cannot be read."""

from __future__ import annotations

import os
import re
from pathlib import Path

from envbuild.doctor.machine_readings import KernelLog, Xid, clean

MAX_LOG = 16 << 20  # bytes; the kernel's ring buffer is smaller unless configured larger
MAX_XIDS = 200
_XID = re.compile(rb"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]{4,20})\): ([0-9]{1,4})(?![0-9])(?:,\s*([^\n]{0,400}))?")


def log(root: Path) -> KernelLog:
    """Returns the newest Xid errors in /dev/kmsg, which has the messages since the machine started."""
    try:
        handle = os.open(root / "dev" / "kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return KernelLog(fault=f"/dev/kmsg: {error.strerror}")
    try:
        return KernelLog(tuple(parse_xids(_records(handle))))
    finally:
        os.close(handle)


def _records(handle: int) -> bytes:
    """Returns the content of the log. Each read returns one record of /dev/kmsg, or the next 64 KiB of a plain file."""
    found = bytearray()
    while len(found) < MAX_LOG:
        try:
            record = os.read(handle, 64 << 10)
        except BlockingIOError:  # no more records yet
            break
        except BrokenPipeError:  # the record was overwritten: the next read continues after it
            continue
        except OSError:
            break
        if not record:
            break
        found += record
    return bytes(found)


def parse_xids(text: bytes) -> list[Xid]:
    """Returns the Xid errors in a kernel log of any format, the oldest first. Of more than 200, only the newest 200."""
    found = [
        Xid(int(number), gpu.decode(), clean(words.decode("utf-8", "replace")))
        for gpu, number, words in _XID.findall(text)
    ]
    return found[-MAX_XIDS:]
