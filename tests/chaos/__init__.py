"""Campaigns of faults: envbuild killed, its engine, its registry and its index going away; `make chaos`."""
