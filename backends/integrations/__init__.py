"""Engines and plans for trainers that are not ours."""
