"""Errors as lessons: raised on purpose, shown, and survived.

A cell that breaks something on purpose must pass if it breaks in the way the lesson says, and fail otherwise. Jupyter's
``raises-exception`` tag does neither: the cell passes if nothing is raised, and papermill stops at it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from labkit import errors
from labkit.base.plain_text import indent

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class ExpectationError(errors.LabkitError, AssertionError):
    """A block that should have raised an error raised none, or a different one."""


class Expectation:
    """The context manager behind :func:`expect_error`.

    Attributes:
        error: The expected error after the block has raised it, None before.
    """

    def __init__(self, types: tuple[type[BaseException], ...], match: re.Pattern[str] | None) -> None:
        self.error: BaseException | None = None
        self._types = types
        self._match = match

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if error is None:
            raise ExpectationError(
                f"expected {self._names()}, but nothing was raised. This cell breaks something on purpose, and it did not break."
            )
        if not isinstance(error, self._types):
            if not isinstance(error, Exception):
                return False  # Ctrl-C and SystemExit keep their meaning unless they are expected
            raise ExpectationError(f"expected {self._names()}, but got another error:\n{_full_text(error)}") from error
        if self._match is not None and not any(self._match.search(text) for text in _messages(error)):
            wanted = f"{self._names()} with a message that matches {self._match.pattern!r}"
            raise ExpectationError(f"expected {wanted}, but its message is:\n{_full_text(error)}") from error
        self.error = error
        _show(LessonText(type(error).__name__, _full_text(error)))
        return True

    def _names(self) -> str:
        return " or ".join(kind.__name__ for kind in self._types)


def expect_error(*types: type[BaseException], match: str | None = None) -> Expectation:
    """Run a block that is expected to raise, and show its error as lesson text.

    The error is shown as the cell would have shown it, with the ranks' own tracebacks, and the cell goes on::

        with labkit.expect_error(labkit.RankFailedError, match="boom"):
            pool.run(explode)

    Args:
        types: The error classes, one of which is expected.
        match: A regular expression that must be found in the error's message, or in the message of any rank's failure.

    Returns:
        A context manager. With ``as caught``, ``caught.error`` is the error after the block.

    Raises:
        TypeError: No class was given, or a class that is not an exception.
        ExpectationError: At the end of the block, if it raised nothing, another class of error, or another message.

    Ranks: controller or local. Takes as long as the block.
    """
    if not types:
        raise TypeError("expect_error needs the class of the error that the block raises, for example RankFailedError.")
    for kind in types:
        if not issubclass(kind, BaseException):
            raise TypeError(f"{kind!r} is not an exception class.")
    return Expectation(types, re.compile(match) if match is not None else None)


def error_class(name: str) -> type[BaseException]:
    """Return the class of :mod:`labkit.errors` called ``name``, for ``%%spmd --expect NAME``.

    Args:
        name: A class name such as ``RankFailedError``.

    Raises:
        ValueError: labkit has no error of this name. The message lists those that a run can raise.

    Ranks: controller.
    """
    found = getattr(errors, name, None)
    if isinstance(found, type) and issubclass(found, errors.LabkitError | errors.RunReport):
        return found
    known = ", ".join(sorted(kind.__name__ for kind in _run_errors()))
    raise ValueError(
        f"labkit has no error called {name!r}. A run raises {known}; an exception of your own code arrives as RankFailedError."
    )


class LessonText:
    """An error's text, as plain text and as a framed block that saved notebooks show without JavaScript."""

    def __init__(self, title: str, text: str) -> None:
        self.title = title
        self.text = text

    def __repr__(self) -> str:
        return f"Expected error, {self.title}:\n{indent(self.text)}"

    def _repr_html_(self) -> str:
        # Set no background and no text colour: either would be unreadable in JupyterLab's light theme or in its dark one.
        return (
            '<div style="border-left: 4px solid #d55e00; padding: 2px 0 2px 12px; margin: 4px 0">'
            f"<div><b>Expected error</b>, {html.escape(self.title)}:</div>"
            # Set every property here, because the surrounding pages set other fonts and break words anywhere.
            '<pre style="font-family: monospace; white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere; '
            'margin: 4px 0 0 0">'
            f"{html.escape(self.text)}</pre></div>"
        )


def _show(lesson: LessonText) -> None:
    from IPython.display import (
        display,  # `import labkit` stays light outside a notebook
    )

    display(lesson)


def _full_text(error: BaseException) -> str:
    """Return what the notebook would show: remote tracebacks if the error has them, else type and message."""
    if isinstance(error, errors.RunReport):
        text = "\n".join(error._render_traceback_())
    else:
        text = f"{type(error).__name__}: {error}"
    return _ANSI.sub("", text).strip()


def _messages(error: BaseException) -> Iterable[str]:
    yield str(error)
    if isinstance(error, errors.RunReport):
        for failure in error.failures:
            yield f"{failure.type_name}: {failure.message}"


def _run_errors() -> Iterable[type[BaseException]]:
    return (
        errors.RankFailedError,
        errors.OpenCollectiveError,
        errors.WorkerDiedError,
        errors.RunTimeoutError,
        errors.RunInterrupted,
    )
