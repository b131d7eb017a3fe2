"""Hides broken packages in processes that vLLM starts: the ranks of an engine are new interpreters, which import
transformers before any code of ours could run there. Python itself loads this file as it starts, from the PYTHONPATH
that `backends.environment.prepare` sets, and then the one that it stands in front of, if there is one.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

for _package in os.environ.get("RLHFLESS_BROKEN_PACKAGES", "").split(","):
    if _package:
        sys.modules.setdefault(_package, None)  # type: ignore[arg-type]

_own = os.path.dirname(os.path.abspath(__file__))
_next = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path or ".") != _own])
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(module_from_spec(_next))
