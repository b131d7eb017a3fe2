"""What all tests share."""

from hypothesis import settings

# The same examples in each run, so that a red one is a change's own; `--hypothesis-profile search` looks for new ones.
# No deadlines: how long an example takes says how busy the machine is.
settings.register_profile("here", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("here")
