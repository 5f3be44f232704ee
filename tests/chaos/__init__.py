"""Fault campaigns: envbuild is killed, its engine, registry and index fail; `make chaos`."""
