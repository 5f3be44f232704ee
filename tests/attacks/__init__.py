"""Attacks that envbuild must refuse, and the ordinary cases next to each of them that it must accept."""
