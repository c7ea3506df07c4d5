"""Skip every test that needs torch or starts a process: `pytest -p tests.support.quick`, which is `make quick`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

import pytest


class _NoTorch:
    """Intercepts the import of torch."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "torch":
            _skip("needs torch")
        return None


def _skip(reason: str) -> NoReturn:
    raise pytest.skip.Exception(reason, allow_module_level=True)


def _no_process(*args: Any, **options: Any) -> NoReturn:
    _skip("starts a process")


sys.meta_path.insert(0, _NoTorch)  # type: ignore[arg-type]
subprocess.Popen.__init__ = _no_process  # type: ignore[method-assign]
os.fork = _no_process
