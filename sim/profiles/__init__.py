"""Profiles: shipped files and the providers that make them."""
