"""Activation offload on GPUs: exact, close to the roofline, faster than torch's wrapper and no heavier; seed rows S1 on NCCL.

``pytest -s tests/gpu/test_offload.py`` prints the figures and keeps them as JSON in build/bench.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import labkit
from labkit.course.runner import run_notebooks
from labkit.spmd.offload_plan import Bus
from tests.benchmarks.table import Figures
from tests.gpu.offload_scenarios import WAYS, Measured, bandwidth, exact, measure, races
from tests.notebooks.conventions import ROOT
from tests.process.s1_scenarios import run
from tests.process.test_s1_offload import BY_LAYER, ENGINES, KINDS, WHOLE, check_same_training

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(600)]

GIB = 1 << 30
LABKIT = WAYS[3:]


@pytest.fixture(scope="module")
def pool() -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(2, device="cuda", replace=True) as pool:
        yield pool


@pytest.fixture(scope="module")
def measured(pool: labkit.WorkerPool) -> Iterator[tuple[dict[str, Measured], Bus]]:
    """Every way of training, the slower rank's figures, and the slower rank's bus."""
    figures = Figures("Activation offload, 12 blocks of 2048, 4 x 2048 tokens a rank, bfloat16, FSDP2")
    buses = pool.run(bandwidth, timeout_s=120)
    bus = min(buses.values(), key=lambda found: found.out_bytes_per_s)
    figures.add("bus, each way, both in use", f"{bus.out_bytes_per_s / 1e9:.1f} GB/s")
    found: dict[str, Measured] = {}
    for way in WAYS:
        found[way] = max(pool.run(measure, way, timeout_s=240).values(), key=lambda one: one.step_s)
        one = found[way]
        figures.add(f"{way}: step", f"{1000 * one.step_s:.1f} ms", f"keep {1000 * found['keep'].step_s:.1f} ms")
        figures.add(f"{way}: peak", f"{one.peak_bytes / GIB:.2f} GiB", f"keep {found['keep'].peak_bytes / GIB:.2f} GiB")
        if one.moved_bytes:
            moved = f"{one.moved_bytes / GIB:.2f} GiB out, {one.fetched_bytes / GIB:.2f} back, {one.num_late} late"
            figures.add(f"{way}: moved in a step", moved, f"pinned {one.host_bytes / GIB:.2f} GiB")
    for way in LABKIT[:2]:
        bound = roofline_s(found["keep"], found[way], bus)
        figures.add(f"{way}: roofline", f"{1000 * bound:.1f} ms", f"step is {found[way].step_s / bound:.3f} of it", "at most 1.10")
    wrapper, moved_inputs = found["offload_wrapper"], found[LABKIT[2]]
    figures.add("faster than offload_wrapper", f"{wrapper.step_s / found['labkit'].step_s:.2f} times", aim="at least 2.5")
    figures.add("inputs and recompute over recompute", f"{moved_inputs.step_s / found['recompute'].step_s:.3f}", aim="at most 1.03")
    yield found, bus
    figures.finish()


def roofline_s(kept: Measured, moved: Measured, bus: Bus) -> float:
    """In each direction the slower of computation, as it is without offload, and bus; and the optimizer."""
    rest_s = kept.step_s - kept.forward_s - kept.backward_s
    out_s, back_s = moved.moved_bytes / bus.out_bytes_per_s, moved.fetched_bytes / bus.back_bytes_per_s
    return max(kept.forward_s, out_s) + max(kept.backward_s, back_s) + rest_s


def test_the_step_is_within_a_tenth_of_the_roofline(measured: tuple[dict[str, Measured], Bus]) -> None:
    found, bus = measured
    assert found["labkit"].moved_bytes > 2 * GIB
    assert found["labkit"].step_s <= 1.10 * roofline_s(found["keep"], found["labkit"], bus)


def test_it_is_two_and_a_half_times_as_fast_as_torch_s_wrapper(measured: tuple[dict[str, Measured], Bus]) -> None:
    found, _ = measured
    assert found["offload_wrapper"].step_s >= 2.5 * found["labkit"].step_s


def test_its_peak_is_no_higher_than_that_of_torch_s_wrapper(measured: tuple[dict[str, Measured], Bus]) -> None:
    found, _ = measured
    assert found["labkit"].peak_bytes <= found["offload_wrapper"].peak_bytes < found["keep"].peak_bytes


def test_moving_inputs_costs_at_most_three_percent_over_recomputing_and_lowers_the_peak(
    measured: tuple[dict[str, Measured], Bus],
) -> None:
    found, _ = measured
    assert found[LABKIT[2]].step_s <= 1.03 * found["recompute"].step_s
    assert found[LABKIT[2]].peak_bytes < found["recompute"].peak_bytes


@pytest.mark.parametrize("way", LABKIT)
def test_gradients_are_exact(pool: labkit.WorkerPool, way: str) -> None:
    for equal, moved in pool.run(exact, way, timeout_s=120).values():
        assert equal
        assert moved > 0


def test_gradients_are_exact_while_memory_is_handed_on_at_once(pool: labkit.WorkerPool) -> None:
    assert pool.run(races, timeout_s=120).same()


@pytest.mark.parametrize("offload_params", [False, True], ids=["parameters stay", "parameters offloaded"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_s1_1_every_nesting_trains_like_the_baseline(pool: labkit.WorkerPool, engine: str, kind: str, offload_params: bool) -> None:
    baseline = pool.run(run, BY_LAYER[1], engine, "nothing", "cuda", offload_params=offload_params, timeout_s=60)
    for nesting in BY_LAYER:
        other = pool.run(run, nesting, engine, kind, "cuda", offload_params=offload_params, timeout_s=60)
        for rank in range(pool.world_size):
            check_same_training(other[rank], baseline[rank])


@pytest.mark.parametrize("by_hand", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", ["checkpoint", "offload_wrapper"])
@pytest.mark.parametrize("engine", ENGINES)
def test_s1_2_four_nestings_agree_for_six_iterations(pool: labkit.WorkerPool, engine: str, kind: str, by_hand: str) -> None:
    baseline = pool.run(run, WHOLE[0], engine, "nothing", "cuda", steps=6, timeout_s=60)
    others = [pool.run(run, nesting, engine, kind, "cuda", steps=6, timeout_s=60) for nesting in WHOLE]
    others.append(pool.run(run, WHOLE[0], engine, kind, "cuda", steps=6, by_hand=by_hand, timeout_s=60))
    for rank in range(pool.world_size):
        for other in others:
            check_same_training(other[rank], baseline[rank])


def test_notebook_02_runs_on_gpus() -> None:
    notebook = ROOT / "notebooks" / "02_activation_offload.ipynb"
    out = ROOT / "build" / "tests" / "gpu"
    (result,) = run_notebooks([notebook], out, parameters={"world_size": 2, "device": "cuda"}, timeout_s=300)
    assert result.passed, result.error
