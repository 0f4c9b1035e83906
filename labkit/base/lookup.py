"""Import of a function by a name such as ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``.

The folder of the user's module comes last on the import path: others may be able to write there, and torch imports many modules
only when it first needs them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.errors import LabkitError


class FunctionNotFoundError(LabkitError, ValueError):
    """A text does not name a callable function."""


def find_function(reference: str) -> Callable[..., Any]:
    """Import the function that a text names, and return it. This runs the user's own module.

    Args:
        reference: ``MODULE:FUNCTION``, also searched for in the current directory, or ``PATH/FILE.py:FUNCTION``, which may import
            other modules of its folder. What is installed under the same name goes before these.

    Raises:
        FunctionNotFoundError: The text has another form, there is no such module, file or function, or importing the module failed
            for any reason, including a SystemExit.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise FunctionNotFoundError(f"{reference!r} names no function. Write MODULE:FUNCTION or FILE.py:FUNCTION.")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
        found = getattr(module, name)
    except (ImportError, AttributeError, OSError) as error:
        raise FunctionNotFoundError(f"{reference!r} names no function: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise FunctionNotFoundError(f"{reference!r} cannot be imported: {described(error)}") from error
    if not callable(found):
        raise FunctionNotFoundError(f"{reference!r} is of type {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def described(error: BaseException) -> str:
    """Return an error in one line, with the line of code that raised it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _load_module(name: str) -> Any:
    _search_last(Path.cwd())
    return importlib.import_module(name)


def _search_last(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _search_last(path.parent.resolve())
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[path.stem]
        else:
            sys.modules[path.stem] = before
        raise
    return module
