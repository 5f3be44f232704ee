"""The TLS contexts of the connections to registries."""

from __future__ import annotations

import ssl
from functools import cache
from pathlib import Path


@cache
def trusting(*files: str) -> ssl.SSLContext:
    """A context that trusts the certificate authorities of the system and of these files and folders. It is cached
    because reading the authorities takes tens of milliseconds. Raises OSError if a file is missing or invalid."""
    context = ssl.create_default_context()
    for file in files:
        if Path(file).is_dir():
            context.load_verify_locations(capath=file)
        else:
            context.load_verify_locations(cafile=file)
    return context
