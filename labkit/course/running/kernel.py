"""The kernel of ``labkit run``: ipykernel's, which imports nothing from the notebook's folder before it serves the notebook."""

from __future__ import annotations

import sys

import psutil  # noqa: F401  # else the kernel would import it at its end, with the notebook's folder on the path
from ipykernel.kernelapp import IPKernelApp

from labkit.base.own_python import with_folder


class RunKernelApp(IPKernelApp):
    """ipykernel's application, with the notebook's folder on the import path under ``-P`` too."""

    def init_path(self) -> None:
        """Put the folder where every kernel has it: IPython 9.7 and later leaves it out under ``-P``."""
        if not self.ignore_cwd:
            sys.path[:] = with_folder(sys.path, "")


def main() -> None:
    """Run the kernel."""
    RunKernelApp.launch_instance()
