"""A notebook in JupyterLab, in a browser: the few actions and queries that the tests need.

JupyterLab is started with ``--expose-app-in-browser``, so the content of cells is read from JupyterLab's model, and everything that
a person sees from the page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import BrowserContext, Locator, Page

START_MS = 90_000
RUN_MS = 120_000

_CURRENT = "window.jupyterapp.shell.currentWidget"
# Not the kernel's own status: it may read idle while a cell runs (jupyterlab/jupyterlab#10701).
_DONE = f"""() => {_CURRENT}.content.widgets.every(
    cell => cell.model.type !== 'code' || [undefined, 'idle'].includes(cell.model.executionState))"""
_RUN = f"""() => {{
    const code = {_CURRENT}.content.widgets.filter(cell => cell.model.type === 'code' && cell.model.sharedModel.source.trim());
    return code.at(-1).model.executionCount
        || code.some(cell => cell.model.toJSON().outputs.some(output => output.output_type === 'error'));
}}"""
_READY = f"""() => {{
    const session = window.jupyterapp?.shell?.currentWidget?.sessionContext;
    return Boolean(session?.isReady && session.session?.kernel?.status === 'idle' && {_CURRENT}.content.widgets.length);
}}"""


class LabPage:
    """One browser tab with one notebook in it.

    Args:
        context: The browser's context.
        address: The server's address.
        token: Its token.
        name: The notebook's path below the server's root.
    """

    def __init__(self, context: BrowserContext, address: str, token: str, name: str) -> None:
        self.name = name
        self.requests: list[str] = []
        self.page: Page = context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(f"{address}/lab/tree/{name}?token={token}&reset", timeout=START_MS)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the notebook is shown and its kernel is idle."""
        self.page.wait_for_function(_READY, timeout=START_MS)

    def command(self, name: str, *, wait: bool = True, **arguments: Any) -> None:
        """Run one of JupyterLab's commands."""
        self.page.evaluate(
            "([name, args, wait]) => { const done = window.jupyterapp.commands.execute(name, args);"
            " return wait ? done.then(() => null) : null }",
            [name, arguments, wait],
        )

    def run_all(self, timeout_ms: int = RUN_MS) -> None:
        """Run all cells and wait until the last has run, or one has failed."""
        self.command("notebook:run-all-cells", wait=False)
        self.page.wait_for_function(_RUN, timeout=timeout_ms)
        self.wait_done(timeout_ms)

    def activate(self, index: int) -> None:
        """Make a cell the active one."""
        self.page.evaluate(f"index => {{ {_CURRENT}.content.activeCellIndex = index }}", index)

    def run(self, *indices: int, wait: bool = True) -> None:
        """Run some cells, one after the other."""
        for index in indices:
            self.activate(index)
            self.command("notebook:run-cell", wait=False)
            self.page.wait_for_function(f"index => {_CURRENT}.content.widgets[index].model.executionState !== undefined", arg=index)
            if wait:
                self.wait_done()

    def set_source(self, index: int, source: str) -> None:
        """Write something else into a cell."""
        self.page.evaluate(
            f"([index, text]) => {_CURRENT}.content.widgets[index].model.sharedModel.setSource(text)", [index, source]
        )

    def wait_done(self, timeout_ms: int = RUN_MS) -> None:
        """Wait until no cell runs or waits."""
        self.page.wait_for_function(_DONE, timeout=timeout_ms)

    def press(self, command: str) -> None:
        """Press the toolbar's button for a command, as a person does."""
        self.page.locator(f'.jp-NotebookPanel-toolbar [data-command="{command}"]').first.click()

    def restart_kernel(self) -> None:
        """Restart the kernel with the toolbar's button, and agree to the question."""
        self.press("notebook:restart-kernel")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        self.page.locator(".jp-Dialog").wait_for(state="detached")
        self.wait_ready()

    def save(self) -> None:
        """Save the notebook."""
        self.command("docmanager:save")

    def close(self) -> None:
        """Close the tab; the kernel lives on."""
        self.page.close()

    def cell(self, index: int) -> Locator:
        """A cell as it is shown."""
        return self.page.locator(".jp-NotebookPanel .jp-Notebook .jp-Cell").nth(index)

    def cells(self) -> list[dict[str, Any]]:
        """All cells as they would be saved."""
        text = self.page.evaluate(f"() => JSON.stringify({_CURRENT}.content.widgets.map(cell => cell.model.toJSON()))")
        found: list[dict[str, Any]] = json.loads(text)
        return found

    def outputs(self, index: int) -> list[dict[str, Any]]:
        """The outputs of a code cell."""
        outputs: list[dict[str, Any]] = self.cells()[index]["outputs"]
        return outputs

    def text(self, index: int) -> str:
        """The visible text below a cell."""
        return "\n".join(self.cell(index).locator(".jp-OutputArea-output").all_inner_texts())

    def errors(self) -> list[str]:
        """The failures: errors in the notebook's outputs, and outputs that JupyterLab could not draw."""
        found = [
            f"{output['ename']}: {output['evalue']}"
            for cell in self.cells()
            for output in cell.get("outputs", [])
            if output["output_type"] == "error"
        ]
        undrawn = self.page.locator(".jp-OutputArea-output", has_text="Error displaying widget")
        return found + undrawn.all_inner_texts()

    def seen(self) -> dict[str, list[Any]]:
        """The visible outputs of each cell: sizes of drawn pictures, and text."""
        return dict(
            self.page.evaluate(
                """() => {
                    const cells = [...document.querySelectorAll('.jp-NotebookPanel .jp-Notebook .jp-CodeCell')];
                    const pictures = cells.map(cell => [...cell.querySelectorAll('.jp-OutputArea-output img')]
                        .map(image => [image.naturalWidth, Math.round(image.getBoundingClientRect().width)]));
                    const texts = cells.map(cell => [...cell.querySelectorAll('.jp-OutputArea-output')]
                        .map(output => output.innerText.trim()).join('\\n').trim());
                    return {pictures, texts};
                }"""
            )
        )

    def wait_pictures(self) -> None:
        """Wait until every picture below a cell is loaded and has a size."""
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('.jp-Notebook .jp-OutputArea-output img')].every("
            "image => image.complete && image.naturalWidth > 0)",
            timeout=30_000,
        )

    def screenshot(self, path: Path, index: int | None = None) -> None:
        """Keep a picture of the page, with a cell scrolled into view when one is named."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if index is not None:
            self.cell(index).scroll_into_view_if_needed()
        self.page.screenshot(path=path)
