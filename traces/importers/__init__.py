"""Readers of other people's files into the trace format."""
