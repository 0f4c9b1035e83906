"""Values travel to the ranks and back: run, push, pull; tensors, functions, subsets of ranks."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from labkit import RankFailedError, RankResults, WorkerPool
from labkit.errors import WireError

LARGE = 300_000  # float32 elements: 1.2 MB, more than travels inside a message


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4, device="cpu", replace=True) as shared:
        yield shared


# ---- run: return values, ranks ---------------------------------------------------------------------------------------


def test_run_returns_one_value_per_rank_in_rank_order(pool: WorkerPool) -> None:
    results = pool.run(lambda base: base + rank, 10)  # noqa: F821
    assert isinstance(results, RankResults)
    assert list(results.items()) == [(0, 10), (1, 11), (2, 12), (3, 13)]


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [
        (None, (0, 1, 2, 3)),
        ("all", (0, 1, 2, 3)),
        (2, (2,)),
        ([3, 0], (0, 3)),
        ("1-2", (1, 2)),
        ("0,2-3", (0, 2, 3)),
        (range(2), (0, 1)),
    ],
    ids=str,
)
def test_case_21_chosen_ranks_run_and_no_others(pool: WorkerPool, ranks: Any, chosen: tuple[int, ...]) -> None:
    pool.push(ran=False)

    def mark() -> int:
        import __main__

        __main__.ran = True
        return __main__.rank

    results = pool.run(mark, ranks=ranks)
    assert results.ranks == chosen
    assert list(results.values()) == list(chosen)
    assert [rank for rank, ran in pool.pull("ran").items() if ran] == list(chosen)


def test_case_21_variables_are_set_and_read_on_chosen_ranks(pool: WorkerPool) -> None:
    pool.push(share="all")
    pool.push(ranks=[1, 3], share="odd")
    assert dict(pool.pull("share")) == {0: "all", 1: "odd", 2: "all", 3: "odd"}
    assert dict(pool.pull("share * 2", ranks=3)) == {3: "oddodd"}


def test_positional_keyword_and_mutable_arguments_arrive(pool: WorkerPool) -> None:
    def echo(*args: Any, **kwargs: Any) -> Any:
        args[1].append(4)
        return args, kwargs

    here = [3]
    assert pool.run(echo, 1, here, b=2, timeout_s=60).same() == ((1, [3, 4]), {"b": 2})
    assert here == [3]


def test_none_is_a_value(pool: WorkerPool) -> None:
    assert dict(pool.run(lambda: None)) == dict.fromkeys(range(4))


def test_each_rank_knows_its_place(pool: WorkerPool) -> None:
    def place() -> tuple[Any, ...]:
        import os

        import torch.distributed as dist

        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        return rank, world_size, local_rank, str(device), dist.get_rank(), dist.get_world_size(), list(map(os.environ.get, names))  # noqa: F821

    for number, found in pool.run(place).items():
        assert found[:6] == (number, 4, number, "cpu", number, 4)
        assert found[6][:4] == [str(number), "4", str(number), "4"]
        assert all(found[6][4:])


def test_default_process_group_works_at_once(pool: WorkerPool) -> None:
    def total() -> float:
        import torch
        import torch.distributed as dist

        ones = torch.ones(2) * dist.get_rank()
        dist.all_reduce(ones)
        return float(ones[0])

    assert pool.run(total).same() == 6.0


class _Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self) -> None: ...


# ---- functions -------------------------------------------------------------------------------------------------------


def test_variables_persist_between_runs_and_cells(pool: WorkerPool) -> None:
    pool.run_cell("counter = rank * 10")
    pool.run_cell("counter += 1")
    pool.push(step=5)
    assert dict(pool.run(lambda: counter + step)) == {0: 6, 1: 16, 2: 26, 3: 36}  # noqa: F821


def test_name_is_looked_up_in_the_notebook_first_and_then_on_the_rank(pool: WorkerPool) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "where": "notebook"}
    exec("def look():\n    return where, only_there", namespace)
    pool.push(where="rank", only_there="rank")
    assert pool.run(namespace["look"]).same() == ("notebook", "rank")


def test_function_sees_what_a_cell_on_the_rank_has_changed_since_its_last_call(pool: WorkerPool) -> None:
    pool.run_cell("level = 1")

    def read() -> int:
        return level  # type: ignore[name-defined]  # noqa: F821

    assert pool.run(read).same() == 1
    pool.run_cell("level = 2")
    assert pool.run(read).same() == 2


class _Adder:
    def __init__(self, base: int) -> None:
        self.base = base

    def __call__(self, value: int) -> int:
        return self.base + value

    def times(self, value: int) -> int:
        return self.base * value


def test_case_2_lambdas_closures_partials_methods_and_callables_run(pool: WorkerPool) -> None:
    def outer(base: int) -> Callable[[int], int]:
        def inner(value: int) -> int:
            return recursive(value) + base

        def recursive(value: int) -> int:
            return 0 if value == 0 else 1 + recursive(value - 1)

        return inner

    assert pool.run(outer(100), 5).same() == 105
    assert pool.run(lambda value: value * 2, 4).same() == 8
    assert pool.run(functools.partial(outer(1), 3)).same() == 4
    assert pool.run(_Adder(7), 1).same() == 8
    assert pool.run(_Adder(7).times, 3).same() == 21
    assert pool.run(len, [1, 2]).same() == 2
    assert pool.run(torch.Tensor.sum, torch.ones(3)).same() == 3.0


def test_case_2_class_that_is_defined_again_is_the_new_one(pool: WorkerPool) -> None:
    for version in (1, 2):
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(f"class Thing:\n    version = {version}\n    def answer(self):\n        return self.version", namespace)
        assert pool.run(lambda thing: thing.answer(), namespace["Thing"]()).same() == version


def test_case_6_function_uses_modules_that_only_the_notebook_imports(pool: WorkerPool) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "import numpy as np\nimport torch\nimport os.path as osp\nfrom math import tau\nimport torch.nn.functional as F\n"
        "def use():\n    return float(np.ones(3).sum() + F.relu(torch.ones(2)).sum()), osp.basename('/a/b'), tau > 6",
        namespace,
    )
    assert pool.run(namespace["use"]).same() == (5.0, "b", True)


def test_function_may_be_called_again_after_it_failed(pool: WorkerPool) -> None:
    def sometimes(fail: bool) -> str:
        if fail:
            raise ValueError("as asked")
        return "fine"

    with pytest.raises(RankFailedError, match="as asked"):
        pool.run(sometimes, True)
    assert pool.run(sometimes, False).same() == "fine"


# ---- tensors ---------------------------------------------------------------------------------------------------------

TENSORS: dict[str, Any] = {
    "bf16": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "fp8": torch.arange(4, dtype=torch.float32).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "bool": torch.tensor([True, False]),
    "int64": torch.arange(5),
    "0-dim": torch.tensor(3.5),
    "empty": torch.zeros(0, 7),
    "not contiguous": torch.arange(12.0).view(3, 4).t(),
    "large": torch.arange(float(LARGE)),
    "numpy": np.arange(LARGE).reshape(2, -1),
    "numpy 0-dim": np.float16(2.5),
    "nested": {"layers": [{"w": torch.ones(2), "n": np.ones(2)}, (torch.zeros(3), None)], "name": "é"},
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and left.dtype == torch.float8_e4m3fn:
        left, right = left.view(torch.uint8), right.view(torch.uint8)
    return RankResults({0: left, 1: right}).same() is left


@pytest.mark.parametrize("name", TENSORS)
def test_value_comes_back_as_it_was_sent(pool: WorkerPool, name: str) -> None:
    value = TENSORS[name]
    assert same(pool.run(lambda value: value, value)[2], value)
    pool.push(value=value)
    back = pool.pull("value")
    assert all(same(back[rank], value) for rank in range(4))


def test_views_of_one_storage_stay_views_on_the_rank_and_on_the_way_back(pool: WorkerPool) -> None:
    base = torch.zeros(LARGE)
    pool.push(base=base, part=base[10:20], ranks=0)
    pool.run_cell("base[12] = 7", ranks=0)
    assert float(pool.pull("part", ranks=0)[0][2]) == 7.0
    both = pool.pull("(base, part)", ranks=0)[0]
    both[0][13] = 9
    assert float(both[1][3]) == 9.0


def test_parameters_stay_parameters_and_tied_weights_tied(pool: WorkerPool) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    pool.push(module=module)
    found = pool.pull("(type(module[0].weight).__name__, module[0].weight is module[1].weight, module[0].weight.requires_grad)")
    assert found.same() == ("Parameter", True, True)
    assert torch.equal(pool.pull("module")[1][0].weight, module[0].weight)


@pytest.mark.parametrize("size", [4, LARGE])
def test_a_rank_changes_its_own_copy_and_no_other(pool: WorkerPool, size: int) -> None:
    tensor, array = torch.zeros(size), np.zeros(size)
    pool.push(tensor=tensor, array=array)
    pool.run_cell("tensor += rank\narray += rank")
    assert list(map(float, pool.pull("tensor[-1] + array[0]").values())) == [0.0, 2.0, 4.0, 6.0]
    assert float(tensor.sum()) == 0.0
    assert float(array.sum()) == 0.0


def test_pulled_values_are_the_notebooks_own(pool: WorkerPool) -> None:
    pool.run_cell("import torch\nbig = torch.zeros(300_000)")
    got = pool.pull("big")
    got[0].fill_(1)
    got[1][0] = 2
    assert float(pool.pull("big.sum()").same()) == 0.0
    assert float(got[2].sum()) == 0.0


def test_memory_files_of_results_are_freed_on_the_ranks(pool: WorkerPool) -> None:
    def open_files() -> int:
        import os

        return len(os.listdir("/proc/self/fd"))

    before = pool.run(open_files)
    for _ in range(20):
        pool.run(lambda: torch.zeros(LARGE))
    after = pool.run(open_files)
    assert all(after[rank] <= before[rank] + 1 for rank in range(4))


def test_dtensor_result_says_how_to_take_it_off_its_mesh(pool: WorkerPool) -> None:
    def shard() -> Any:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        return {"w": distribute_tensor(torch.ones(8), init_device_mesh("cpu", (4,)), [Shard(0)])}

    with pytest.raises(RankFailedError, match=r"\.to_local\(\), or the whole tensor with \.full_tensor\(\)"):
        pool.run(shard)
    assert pool.run(lambda: 1).same() == 1


# ---- what cannot travel ----------------------------------------------------------------------------------------------


def test_unpicklable_argument_is_named_and_nothing_is_sent(pool: WorkerPool) -> None:
    pool.push(calls=0)

    def count(*args: Any, **kwargs: Any) -> None:
        import __main__

        __main__.calls += 1

    with pytest.raises(WireError, match=r"argument 1 cannot be sent to the ranks: a value of type _thread.lock"):
        pool.run(count, 0, threading.Lock())
    with pytest.raises(WireError, match="argument 'key' cannot be sent"):
        pool.run(count, key=threading.Lock())
    assert pool.pull("calls").same() == 0


def test_unpicklable_variable_of_a_function_is_named(pool: WorkerPool) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "guard": threading.Lock()}
    exec("def use():\n    return guard", namespace)
    with pytest.raises(WireError, match="the variable 'guard' that the function uses cannot be sent"):
        pool.run(namespace["use"])


def test_unpicklable_variable_of_a_closure_is_named(pool: WorkerPool) -> None:
    guard = threading.Lock()
    with pytest.raises(WireError, match="the variable 'guard' that the function uses cannot be sent"):
        pool.run(lambda: guard)


def test_case_5_large_variable_inside_a_comprehension_or_a_partial_is_named_too(pool: WorkerPool) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "table": torch.zeros(20 * 2**20)}
    exec("def use(count):\n    return [float(table[number]) for number in range(count)]", namespace)
    with pytest.warns(UserWarning, match="variable 'table'"):
        assert pool.run(functools.partial(namespace["use"], 2), ranks=0)[0] == [0.0, 0.0]


def test_unpicklable_callable_is_named(pool: WorkerPool) -> None:
    with pytest.raises(WireError, match=r"the function cannot be sent to the ranks: .*cannot pickle '_thread.lock' object"):
        pool.run(_Holder(threading.Lock()))


def test_unpicklable_pushed_variable_is_named(pool: WorkerPool) -> None:
    with pytest.raises(WireError, match=r"'guard'.*a value of type _thread.lock"):
        pool.push(fine=1, guard=threading.Lock())


def test_unpicklable_result_is_an_error_of_its_rank(pool: WorkerPool) -> None:
    def produce() -> Any:
        import threading

        return threading.Lock() if rank == 2 else rank  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(RankFailedError, match=r"a value of type _thread.lock cannot be sent") as caught:
        pool.run(produce)
    assert caught.value.failed_ranks == (2,)
    assert caught.value.finished == (0, 1, 3)
    assert pool.run(lambda: 1).same() == 1


def test_result_that_cannot_be_read_here_names_its_rank_and_the_pool_goes_on(pool: WorkerPool) -> None:
    pool.run_cell(
        "import sys, types\nmodule = types.ModuleType('only_on_ranks')\nexec('class Thing: pass', module.__dict__)\n"
        "sys.modules['only_on_ranks'] = module\nmodule.Thing.__module__ = 'only_on_ranks'"
    )
    with pytest.raises(WireError, match=r"the result of rank 0 cannot be read here: ModuleNotFoundError.*only_on_ranks"):
        pool.pull("module.Thing()")
    assert pool.run(lambda: 1).same() == 1


def test_case_5_large_captured_variable_warns_with_its_name_and_size(pool: WorkerPool) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "table": torch.zeros(25 * 2**20)}
    exec("def use():\n    return float(table[0])", namespace)
    with pytest.warns(UserWarning, match=r"variable 'table' and takes all 100 MiB of it to each rank") as caught:
        assert pool.run(namespace["use"]).same() == 0.0
    assert len(caught) == 1
    assert "pool.push(table=table)" in str(caught[0].message)


def test_large_argument_and_push_do_not_warn(pool: WorkerPool) -> None:
    table = torch.zeros(25 * 2**20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pool.run(lambda value: float(value[0]), table, ranks=0)[0] == 0.0
        pool.push(table=table, ranks=0)
        pool.run_cell("del table", ranks=0)


# ---- pull ------------------------------------------------------------------------------------------------------------


def test_pull_takes_expressions_of_the_ranks_names(pool: WorkerPool) -> None:
    pool.push(model={"w": [1, 2]})
    assert pool.pull("model['w'][1] + world_size").same() == 6


def test_pull_of_an_unknown_name_says_which(pool: WorkerPool) -> None:
    with pytest.raises(RankFailedError, match="ranks 0-3: NameError: name 'never_set' is not defined"):
        pool.pull("never_set")


def test_pull_of_a_statement_is_refused_before_it_is_sent(pool: WorkerPool) -> None:
    with pytest.raises(SyntaxError):
        pool.pull("x = 1")
