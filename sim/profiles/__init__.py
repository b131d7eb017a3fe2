"""Profiles: shipped files and the providers that make them.

`registry` finds and reads profiles; `tables` makes them from aiconfigurator's measured operator tables, `vidur` from
Vidur's measurements, `roofline` from a data sheet. All share `model` (what a Hugging Face config.json says) and
`common` (grids, memory, limits). `calibrate` fits any of them to whole engines.
"""

from sim.profiles.registry import load, names

__all__ = ["load", "names"]
