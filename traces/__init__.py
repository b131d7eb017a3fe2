"""Traces: recorded and synthetic response lengths in one versioned format."""
