"""The README shows real output, and its links work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

RUN_CELLS = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.load(sys.stdin):
    shell.run_cell(cell).raise_error()
shell.run_cell("pool.close()")
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.process
def test_the_first_example_gives_the_output_that_stands_below_it() -> None:
    start, cell = (block for block in blocks("python") if block.startswith(("%load_ext", "%%spmd")))
    output = blocks("text")[0]
    run = subprocess.run(
        [sys.executable, "-c", RUN_CELLS],
        input=json.dumps([start.replace("world_size=4", "world_size=4, device='cpu'"), cell]),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    # Ranks print in any order.
    assert sorted(run.stdout.splitlines()) == sorted(output.splitlines())


def test_the_example_is_short() -> None:
    (cell,) = (block for block in blocks("python") if block.startswith("%%spmd"))
    assert len(cell.splitlines()) <= 10


def test_relative_links_and_images_exist() -> None:
    links = re.findall(r"\]\(([^)#\s]+)\)", README)
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert links
    assert missing == []


def test_every_notebook_is_on_the_front_page() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert names <= set(re.findall(r"\((notebooks/[^)]*\.ipynb)\)", README))
