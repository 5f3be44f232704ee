"""Injects faults of a statistical model into the operations of the self-test's probes; run by
benchmarks/injections.py."""
