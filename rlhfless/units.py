"""Units. Inside the project: seconds, bytes, tokens, US dollars. Anything else is converted at a file's edge."""

GB = 1e9
"""Bytes in a gigabyte, as data sheets count bandwidth and memory."""
GIB = float(1 << 30)
"""Bytes in a gibibyte, as memory sizes are reported by drivers."""
MIB = float(1 << 20)
"""Bytes in a mebibyte, likewise."""
GBIT = 1e9 / 8
"""Bytes in a gigabit, as network cards are rated."""
TERA = 1e12
MS = 1e-3
"""Seconds in a millisecond."""
HOUR_S = 3600.0
"""Seconds in an hour, as GPU prices are quoted."""
