"""What all tests share."""

from hypothesis import settings

settings.register_profile("here", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("here")
