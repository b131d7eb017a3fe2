"""Commands and their configuration files, as tests use them."""

import re
from pathlib import Path
from typing import Any

import pytest

from rlhfless.commands import run


def call(command: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, an app or the module that has it, in this process."""
    app = getattr(command, "app", command)
    with pytest.raises(SystemExit) as end:
        run(lambda **kwargs: app(arguments, **kwargs))
    out, err = capsys.readouterr()
    return int(str(end.value.code)), out, err


def refused(command: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line with which a command ends that refuses its input."""
    code, printed, err = call(command, arguments, capsys)
    assert code == 2
    assert printed == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    return err.removeprefix("error: ")


def edited(example: Path, folder: Path, **values: str) -> Path:
    """A configuration file with other values, by key, in `folder`; the first key of that name in the file counts."""
    text = example.read_text()
    for key, value in values.items():
        text, count = re.subn(rf"^{key} = .*$", f"{key} = {value}", text, count=1, flags=re.MULTILINE)
        assert count == 1, key
    path = folder / "config.toml"
    path.write_text(text)
    return path
