"""Executors on real hardware. Nothing is here yet: plans run in the simulator (`sim`)."""
