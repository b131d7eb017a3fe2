"""What all tests share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# The same examples in each run, so that a red one is a change's own; `--hypothesis-profile search` looks for new ones.
# No deadlines: how long an example takes says how busy the machine is.
settings.register_profile("here", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("here")


@pytest.fixture(scope="session")
def beside() -> Iterator[Any]:
    """A process with vLLM imported and no engine, which calls functions: pytest's own has neither vLLM nor PyTorch."""
    from tests.step_engines import Child

    child = Child()
    try:
        yield child
    finally:
        child.close()


@pytest.fixture(scope="session")
def tiny_model(beside: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model. Nothing may change what is in it."""
    from tests.step_engines import make_model

    folder: Path = beside(make_model, tmp_path_factory.mktemp("made") / "tiny-model", 1)
    return folder
