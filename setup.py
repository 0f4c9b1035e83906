"""The one thing that pyproject.toml cannot say: a wheel carries the labs as students get them, without their solutions."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithLabs(build_py):
    """Build the package, and write the students' copies of notebooks/ into it."""

    def run(self) -> None:
        """Build; an editable installation needs no copies, since it has the notebooks themselves."""
        super().run()
        if self.editable_mode:
            return
        sys.path.insert(0, str(ROOT))
        import nbformat

        from labkit.course.learner.copies import CARRIED, student_labs

        folder = Path(self.build_lib) / CARRIED.relative_to(ROOT)
        folder.mkdir(parents=True, exist_ok=True)
        for name, notebook in student_labs().items():
            nbformat.write(notebook, folder / f"{name}.ipynb")


setup(cmdclass={"build_py": BuildWithLabs})
