"""Fault campaigns (`make chaos`): envbuild is killed, or the engine, the registry or the index fails."""
