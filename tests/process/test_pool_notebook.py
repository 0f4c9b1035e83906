"""A notebook in a real kernel: code in its cells works on the ranks, and each output appears under its own cell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
from papermill.exceptions import PapermillExecutionError

from tests.process.notebook import CellRun, run_cells

CELLS = {
    "start": "%load_ext labkit\nimport labkit\nimport numpy as np\nimport torch\npool = labkit.WorkerPool(3, device='cpu')",
    # case 2: functions, classes, lambdas, closures
    "define": (
        "def helper(x):\n    return x / (x - 2)  # the culprit\n\n"
        "class Net:\n    scale = 1\n    def __init__(self, w):\n        self.w = w\n    def forward(self, x):\n"
        "        return self.scale * helper(self.w + x)\n\n"
        "def outer(n):\n    def inner(x):\n        return n * x\n    return inner"
    ),
    "function": "pool.run(helper, 4)",
    "class": "pool.run(lambda net: net.forward(1), Net(3))",
    "lambda": "pool.run(lambda x: x + rank, 10)",
    "closure": "pool.run(outer(5), 2)",
    "redefine": "class Net(Net):\n    scale = 100\n    def forward(self, x):\n        return self.scale * (self.w + x)",
    "redefined": "pool.run(lambda net: (net.forward(1), type(net) is Net), Net(3))",
    "returned": "back = pool.run(lambda: Net(rank))\n[(type(net) is Net, net.w) for net in back.values()]",
    # case 4: pickle and torch.save on the rank, of classes from a kernel cell and from a %%spmd cell
    "pickle": (
        "import io, pickle\ndef roundtrip(net):\n    buffer = io.BytesIO()\n    torch.save(net, buffer)\n    buffer.seek(0)\n"
        "    loaded = torch.load(buffer, weights_only=False)\n"
        "    return [type(thing) is type(net) for thing in (pickle.loads(pickle.dumps(net)), loaded)]\n"
        "pool.run(roundtrip, Net(3))"
    ),
    "pushed": "pool.push(net=Net(7))",
    "pushed pickle": "%%spmd\nimport pickle\npickle.loads(pickle.dumps(net)).w, Net.scale",
    "spmd pickle": (
        "%%spmd\nimport io, pickle, torch\nclass A:\n    w = 5\nbuffer = io.BytesIO()\ntorch.save(A(), buffer)\nbuffer.seek(0)\n"
        "type(pickle.loads(pickle.dumps(A()))) is A, torch.load(buffer, weights_only=False).w"
    ),
    "spmd class returned": "pool.pull('A()')[1].w",
    # case 3: dataset of a notebook cell in DataLoader workers on the ranks
    "dataset": (
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Squares(Dataset):\n    def __len__(self):\n        return 4\n"
        "    def __getitem__(self, i):\n        return torch.tensor(i * i)\n"
        "pool.run(lambda data: [int(x) for x in DataLoader(data, num_workers=2)], Squares())"
    ),
    # case 6: imports of the notebook only
    "imports": "def use():\n    return float(np.ones(3).sum() + torch.ones(2).sum())\npool.run(use)",
    # case 16
    "print": "%%spmd\nfor i in range(3):\n    print(i, 'of', rank)",
    "silence": "1 + 1",
    "print again": "%%spmd\nprint('second', rank)",
    # case 17 and tracebacks
    "raise everywhere": "pool.run(helper, 2)",
    "raise deep": "pool.run(lambda: Net.__mro__[1](1).forward(1))",
    "raise differently": "%%spmd\nx = 1\nif rank == 2:\n    {}['w']\n\nraise ValueError('same on both')",
    "raise with cause": "%%spmd\ntry:\n    int('x')\nexcept ValueError as error:\n    raise RuntimeError('outer') from error",
    "after errors": "%%spmd\nx + rank",
    # rich output
    "rich": (
        "%%spmd\nimport matplotlib.pyplot as plt\nimport pandas as pd\nfrom IPython.display import display\n"
        "plt.plot([0, rank])\nplt.show()\ndisplay(pd.DataFrame({'rank': [rank]}))"
    ),
    "progress": "%%spmd\nfrom tqdm import tqdm\nfor _ in tqdm(range(20), desc='train'):\n    pass",
    "result": "pool.run(lambda: torch.ones(2))",
    # outputs that a page cannot reach, or can only clear as a whole
    "widgets": (
        "%%spmd\nimport time\nfrom tqdm.notebook import tqdm\nfor _ in tqdm(range(20), desc='train'):\n    time.sleep(0.02)\n"
        "import ipywidgets\nipywidgets.IntSlider(3)"
    ),
    "clear": (
        "%%spmd\nfrom IPython.display import clear_output, display\nimport torch.distributed as dist\nprint('first', rank)\n"
        "_ = display({'of': rank}, display_id='one')\n_.update({'changed': rank})\ndist.barrier()\ntime.sleep(0.3)\n"
        "if rank == 1:\n    clear_output(wait=True)\n    time.sleep(0.3)\n    print('second', rank)\n"
        "dist.barrier()\nif rank == 2:\n    clear_output()"
    ),
    # a module that is edited
    "write module": (
        "import os, pathlib, sys\nsys.path.insert(0, '')\ndef write(text):\n"
        "    pathlib.Path('mymod.py').write_text(f'def f():\\n    return {text!r}\\n')\nwrite('old')"
    ),
    "autoreload": "%load_ext autoreload\n%autoreload 2\nimport mymod",
    "autoreload on ranks": "%%spmd\n%load_ext autoreload\n%autoreload 2\nimport sys\nsys.path.insert(0, '')\nimport mymod",
    "old code": "pool.run(mymod.f)",
    "edit module": "write('new code')\nos.utime('mymod.py', (2e9, 2e9))",
    "new code": "pool.run(mymod.f)",
    # errors of labkit itself
    "unpicklable": "import threading\nlock = threading.Lock()\npool.run(lambda: lock)",
    "bad pool": "labkit.WorkerPool(0)",
    "second pool": "labkit.WorkerPool(2)",
    "swallow": "try:\n    pool.run(helper, 2)\nexcept labkit.RankFailedError as error:\n    print(error.failed_ranks)",
    "close": "pool.close()",
    "closed": "pool.run(helper, 1)",
}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CellRun]:
    return run_cells(CELLS, tmp_path_factory.mktemp("notebook"))


def shown(cells: dict[str, CellRun], name: str) -> str:
    cell = cells[name]
    assert cell.error is None, cell.text
    return cell.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("function", "ranks 0-2: 2.0"),
        ("class", "ranks 0-2: 2.0"),
        ("lambda", "rank 0: 10\nrank 1: 11\nrank 2: 12"),
        ("closure", "ranks 0-2: 10"),
    ],
)
def test_case_2_what_a_cell_defines_runs_on_the_ranks(cells: dict[str, CellRun], name: str, text: str) -> None:
    assert shown(cells, name) == text


def test_case_2_redefined_class_is_the_new_one_on_the_ranks(cells: dict[str, CellRun]) -> None:
    assert shown(cells, "redefined") == "ranks 0-2: (400, True)"


def test_object_that_comes_back_is_of_the_notebooks_own_class(cells: dict[str, CellRun]) -> None:
    assert shown(cells, "returned") == "[(True, 0), (True, 1), (True, 2)]"


def test_case_4_class_of_a_notebook_cell_pickles_and_saves_on_the_rank(cells: dict[str, CellRun]) -> None:
    assert shown(cells, "pickle") == "ranks 0-2: [True, True]"


def test_case_4_pushed_object_brings_its_class(cells: dict[str, CellRun]) -> None:
    assert shown(cells, "pushed") == ""
    assert shown(cells, "pushed pickle") == "ranks 0-2: (7, 100)"


def test_case_4_class_of_a_cell_on_the_ranks_pickles_saves_and_comes_back(cells: dict[str, CellRun]) -> None:
    assert shown(cells, "spmd pickle") == "ranks 0-2: (True, 5)"
    assert shown(cells, "spmd class returned") == "5"


def test_case_3_dataset_of_a_notebook_cell_feeds_a_dataloader_on_the_ranks(cells: dict[str, CellRun]) -> None:
    assert shown(cells, "dataset") == "ranks 0-2: [0, 1, 4, 9]"


def test_case_6_modules_imported_in_the_notebook_only_are_there(cells: dict[str, CellRun]) -> None:
    assert shown(cells, "imports") == "ranks 0-2: 5.0"


def test_case_16_text_appears_in_the_cell_that_printed_it_once(cells: dict[str, CellRun]) -> None:
    lines = cells["print"].stream("stdout").splitlines()
    assert sorted(lines) == sorted(f"[rank {rank}] {i} of {rank}" for rank in range(3) for i in range(3))
    assert [line for line in lines if line.startswith("[rank 1]")] == [f"[rank 1] {i} of 1" for i in range(3)]
    assert shown(cells, "silence") == "2"
    assert sorted(cells["print again"].stream("stdout").splitlines()) == [f"[rank {rank}] second {rank}" for rank in range(3)]


def error_text(cells: dict[str, CellRun], name: str, kind: str) -> str:
    error = cells[name].error
    assert error is not None, cells[name].text
    assert error.ename == kind
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))


def test_case_17_error_on_every_rank_shows_one_traceback_under_its_cell(cells: dict[str, CellRun]) -> None:
    text = error_text(cells, "raise everywhere", "RankFailedError")
    assert text.count("# the culprit") == 1
    assert text.count("ZeroDivisionError: division by zero\n") == 1
    assert "ranks 0-2" in text
    assert "ranks 0-2: ZeroDivisionError: division by zero" in cells["raise everywhere"].error.evalue


def test_traceback_shows_the_lines_of_every_cell_on_the_way(cells: dict[str, CellRun]) -> None:
    text = error_text(cells, "raise deep", "RankFailedError")
    define, deep = cells["define"].number, cells["raise deep"].number
    assert f"Cell In[{deep}], line 1" in text
    assert f"Cell In[{define}], line 9, in forward" in text
    assert f"Cell In[{define}], line 2, in helper" in text
    assert re.search(r"----> +2 +return x / \(x - 2\)  # the culprit", text)


def test_traceback_has_no_frame_of_labkit_or_of_the_kernel(cells: dict[str, CellRun]) -> None:
    for name in ("raise everywhere", "raise deep", "raise differently", "raise with cause"):
        text = error_text(cells, name, "RankFailedError")
        assert "labkit/" not in text
        assert "ipykernel" not in text
        assert "interactiveshell" not in text


def test_case_17_different_errors_are_all_shown(cells: dict[str, CellRun]) -> None:
    text = error_text(cells, "raise differently", "RankFailedError")
    number = cells["raise differently"].number
    assert text.count("ValueError: same on both\n") == 1
    assert text.count("KeyError: 'w'\n") == 1
    # the lines are counted as the reader sees them, with the magic's line as the first
    assert f"Cell In[{number}], line 4" in text
    assert f"Cell In[{number}], line 6" in text


def test_cause_is_shown_with_its_line(cells: dict[str, CellRun]) -> None:
    text = error_text(cells, "raise with cause", "RankFailedError")
    assert text.index("int('x')") < text.index("direct cause") < text.index("RuntimeError: outer")


def test_variables_live_on_after_errors(cells: dict[str, CellRun]) -> None:
    assert shown(cells, "after errors") == "rank 0: 1\nrank 1: 2\nrank 2: 3"


def test_figures_and_tables_stand_under_their_ranks(cells: dict[str, CellRun]) -> None:
    order: list[Any] = []
    for data in cells["rich"].displays:
        kind = "figure" if "image/png" in data else "table" if "<table" in data.get("text/html", "") else data["text/plain"]
        order.append(kind)
    for rank in range(3):
        places = [place for place, kind in enumerate(order) if kind == f"rank {rank}:"]
        assert sorted(order[place + 1] for place in places) == ["figure", "table"]


def test_progress_bar_is_kept_as_one_line_for_each_rank(cells: dict[str, CellRun]) -> None:
    lines = cells["progress"].stream("stderr").splitlines()
    assert [re.match(r"\[rank \d\] train: 100%", line) is not None for line in lines] == [True] * 3


def test_result_is_plain_text_and_html_without_widgets(cells: dict[str, CellRun]) -> None:
    (data,) = cells["result"].displays
    assert set(data) == {"text/plain", "text/html"}
    assert data["text/plain"] == "ranks 0-2: tensor([1., 1.])"


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("unpicklable", "WireError", "the variable 'lock' that the function uses cannot be sent to the ranks"),
        ("bad pool", "InvalidPoolError", "at least 1, not 0"),
        ("second pool", "PoolStateError", "replace=True"),
        ("closed", "PoolStateError", "pool.restart()"),
    ],
)
def test_error_of_labkit_shows_the_readers_line_and_what_to_do(cells: dict[str, CellRun], name: str, kind: str, says: str) -> None:
    text = error_text(cells, name, kind)
    assert says in text
    assert f"Cell In[{cells[name].number}], line" in text
    assert "labkit/controller" not in text


def test_error_can_be_caught_and_read(cells: dict[str, CellRun]) -> None:
    assert shown(cells, "swallow") == "(0, 1, 2)\n"


def test_papermill_stops_at_the_cell_that_fails_on_a_rank(tmp_path: Path) -> None:
    cells = [
        "%load_ext labkit\nimport labkit\npool = labkit.WorkerPool(2, device='cpu')",
        "%%spmd\nif rank == 1:\n    raise ValueError('stop here')",
        "open('went on', 'w').close()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    nbformat.write(notebook, tmp_path / "in.ipynb")
    with pytest.raises(PapermillExecutionError) as caught:
        papermill.execute_notebook(
            tmp_path / "in.ipynb", tmp_path / "out.ipynb", cwd=tmp_path, kernel_name="python3", progress_bar=False
        )
    assert caught.value.ename == "RankFailedError"
    assert "rank 1: ValueError: stop here" in caught.value.evalue
    assert not (tmp_path / "went on").exists()


def test_cells_that_should_pass_pass(cells: dict[str, CellRun]) -> None:
    assert [name for name, cell in cells.items() if cell.error is not None] == [
        "raise everywhere",
        "raise deep",
        "raise differently",
        "raise with cause",
        "unpicklable",
        "bad pool",
        "second pool",
        "closed",
    ]


def test_p11_widgets_of_the_ranks_are_shown_as_text_that_is_brought_up_to_date(cells: dict[str, CellRun]) -> None:
    text = shown(cells, "widgets")
    bundles = [data for data in cells["widgets"].displays if "text/html" not in data]
    assert all(set(data) == {"text/plain"} for data in bundles), bundles
    bars = [data["text/plain"] for data in bundles if data["text/plain"].startswith("train:")]
    assert len(bars) == 3
    assert all(re.match(r"train: 100%\|\S+\| 20/20 \[", bar) for bar in bars), bars
    assert text.endswith("ranks 0-2: IntSlider(value=3)")
    told = cells["widgets"].stream("stderr").splitlines()
    assert sorted(line.partition(" A widget on a rank is shown as text")[0] for line in told) == [
        "[rank 0]",
        "[rank 1]",
        "[rank 2]",
    ]


def test_p16_clear_output_on_a_rank_clears_what_that_rank_has_put_out(cells: dict[str, CellRun]) -> None:
    shown(cells, "clear")
    assert sorted(cells["clear"].stream("stdout").splitlines()) == ["[rank 0] first 0", "[rank 1] second 1"]
    assert [data["text/plain"] for data in cells["clear"].displays] == ["rank 0:", "{'changed': 0}"]


def test_p12_function_of_an_edited_module_is_the_new_one_where_autoreload_is_on(cells: dict[str, CellRun]) -> None:
    assert shown(cells, "old code") == "ranks 0-2: 'old'"
    assert shown(cells, "new code") == "ranks 0-2: 'new code'"
