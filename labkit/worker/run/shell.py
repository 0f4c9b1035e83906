"""The IPython shell of a rank, which compiles and runs cells as a notebook's own kernel would.

The rank's namespace is the module ``__main__`` itself, so classes from cells pickle by name and DataLoader workers find them.
History, profile folders and prompts are switched off, because no person types at a rank.
"""

from __future__ import annotations

import linecache
import sys
import types
import warnings
from typing import Any, ClassVar

from IPython.core.interactiveshell import ExecutionInfo, InteractiveShell
from traitlets import Type
from traitlets.config import Config

from labkit.base.tracebacks import format_error
from labkit.wire.messages import Display
from labkit.worker.run.capture import Emit
from labkit.worker.run.display import RankDisplayHook, RankDisplayPublisher
from labkit.worker.run.widgets import WidgetTexts

_CONFIG = Config(
    {
        "HistoryManager": {"enabled": False, "hist_file": ":memory:"},
        "InteractiveShell": {"cache_size": 0, "colors": "nocolor", "history_length": 0, "history_load_length": 0},
    }
)


_plain_warning = warnings.formatwarning


class RankShell(InteractiveShell):
    """A shell that runs cells and keeps errors instead of printing them."""

    displayhook_class = Type(RankDisplayHook)
    display_pub_class = Type(RankDisplayPublisher)
    display_pub: RankDisplayPublisher
    displayhook: RankDisplayHook
    _first_names: ClassVar[dict[str, Any]] = {}

    @classmethod
    def create(cls, emit: Emit, variables: dict[str, Any]) -> RankShell:
        """Make the process's shell.

        Args:
            emit: The function that sends what the rank displays.
            variables: The first names in its namespace.
        """
        module = types.ModuleType("__main__", "The namespace of this rank.")
        cls._first_names = dict(variables)
        shell = cls.instance(config=_CONFIG, user_module=module)
        shell.display_pub.emit = emit
        shell.display_pub.widgets = shell.displayhook.widgets = widgets = WidgetTexts(emit)
        shell.events.register("post_execute", widgets.forget)
        shell.db = {}  # used by %cd and others; by default it is in the profile folder
        # IPython's warning when a cell raises SystemExit; the run's error explains what it means for a rank.
        warnings.filterwarnings("ignore", "To exit: use", UserWarning)
        warnings.formatwarning = shell._format_warning
        return shell

    def _format_warning(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        """Format a warning as Python does, but name a cell by its number and not by its code's name."""
        line = linecache.getline(filename, lineno) if line is None else line
        number = self.number_of(filename)
        return _plain_warning(message, category, filename if number is None else f"Cell In[{number}]", lineno, line)

    def init_user_ns(self) -> None:
        """Set the first names of the namespace. ``%reset`` calls this too: a rank needs its own names."""
        super().init_user_ns()
        self.user_ns.update(self._first_names)

    # A rank makes no folders in the user's home and starts no interactive machinery.
    def init_ipython_dir(self, ipython_dir: Any) -> None:
        """Use no folder: a rank keeps no profile."""
        self.ipython_dir = ""

    def init_profile_dir(self, profile_dir: Any) -> None:
        """Use no folder: a rank keeps no profile."""
        self.profile_dir = None

    def init_virtualenv(self) -> None:
        """Do nothing: the fork server runs in the kernel's own environment."""

    def init_pdb(self) -> None:
        """Do nothing: no person types at a rank."""

    def ask_exit(self) -> None:
        """End the cell, not the rank, at ``exit()`` in a cell."""
        raise SystemExit

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing: figures are shown inline. ``%matplotlib inline`` calls this."""

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Show an error that does not fail the cell, such as a broken repr. An error that does is in the run's Failed message."""
        if exc_tuple is not None:
            sys.stderr.write(format_error(exc_tuple[1], self.number_of) + "\n")

    def showsyntaxerror(self, *args: Any, **kwargs: Any) -> None:
        """Print nothing: the run's Failed message contains the traceback."""

    def run_source(self, source: str, cell_number: int | None) -> tuple[Any, Display | None]:
        """Run a cell.

        Args:
            source: The cell, with magics, ``!`` and top-level ``await`` as in a notebook.
            cell_number: The kernel's number for it.

        Returns:
            The last expression's value and its display, or (None, None).

        Raises:
            BaseException: The error that the cell raised.
        """
        if cell_number is not None:
            self.execution_count = cell_number
        self.displayhook.source = source
        self.displayhook.take()
        result = self.run_cell(source, store_history=False)
        # The shell would keep the exception, and through its frames every local tensor, until the next cell.
        self.last_execution_result = None
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            self.displayhook.take()
            raise error
        return self.displayhook.take()

    def prepare_call(self) -> None:
        """Do before a function call what IPython does before a cell, such as autoreload's check of the modules."""
        self.events.trigger("pre_execute")
        self.events.trigger("pre_run_cell", ExecutionInfo("", False, False, True, None))

    def number_of(self, filename: str) -> int | None:
        """Return the notebook's number of the cell with this file name; None for real files."""
        return self.compile._filename_map.get(filename)


def type_name(error: BaseException) -> str:
    """Return ``ValueError``, or ``package.module.Name`` for a class that is neither a builtin nor from a cell."""
    kind = type(error)
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def register_sources(shell: RankShell, sources: dict[str, tuple[list[str], int | None]]) -> None:
    """Register the source of functions from notebook cells, so that tracebacks here can show their lines."""
    for filename, (lines, number) in sources.items():
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
        if number is not None:
            shell.compile._filename_map[filename] = number
