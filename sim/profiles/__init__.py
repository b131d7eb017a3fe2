"""Profiles: shipped files and the providers that make them.

`registry` finds and reads profiles; `tables` makes them from aiconfigurator's measured operator tables, `roofline`
from a data sheet. All three share `model` (what a Hugging Face config.json says) and `common` (grids, memory, limits).
"""

from sim.profiles.registry import load, names

__all__ = ["load", "names"]
