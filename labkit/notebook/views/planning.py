"""A planner for a training run, to try settings before any rank starts: how much memory one rank needs, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.notebook.drawing.style import Picture
from labkit.notebook.pictures.bars import memory_bars
from labkit.notebook.views.explore import Options, explore

Predict = Callable[[int, str, str], Mapping[str, int]]
MIB = 1 << 20


def planner(
    predict: Predict,
    *,
    ranks: Sequence[int],
    dtypes: Sequence[str],
    blocks: Sequence[str],
    limits_mib: Sequence[float],
    start: Mapping[str, Any] | None = None,
) -> None:
    """Show the predicted memory of one rank as a stacked bar against a limit, with a control for each setting.

    Args:
        predict: Called with the number of shards, the dtype and the treatment of the blocks' activations; returns the bytes of each
            part, always the same parts, as `labkit.spmd.memory.predict.predict_peak` does.
        ranks: World sizes to choose from, ascending.
        dtypes: Names of the dtypes to choose from.
        blocks: The treatments of activations to choose from.
        limits_mib: Memory of a device, in MiB, to choose from.
        start: The settings to begin with, by name: ``ranks``, ``mesh``, ``dtype``, ``blocks``, ``limit_mib``.

    Raises:
        ControlError: There is nothing to choose from, or an initial setting is not one of the options.

    Ranks: controller.
    """
    controls: dict[str, Options] = {"ranks": ranks, "mesh": meshes, "dtype": dtypes, "blocks": blocks, "limit_mib": limits_mib}
    first: list[Mapping[str, int]] = []

    def draw(ranks: int, mesh: str, dtype: str, blocks: str, limit_mib: float) -> Picture:
        chosen = predict(num_shards(mesh), dtype, blocks)
        if not first:
            first.append(chosen)
        words = f"{ranks} rank{'s' * (ranks > 1)} as {mesh}, {dtype}, blocks: {blocks}"
        return memory_bars(
            {"start": first[0], "chosen": chosen},
            caption=f"{words}. {verdict(sum(chosen.values()), round(limit_mib * MIB))}",
            what="predicted peak of one rank",
            limit_bytes=round(limit_mib * MIB),
        )

    explore(draw, controls, start)


def meshes(ranks: int) -> list[str]:
    """Return the meshes of some ranks, as ``replicas x shards``: from sharding over all ranks (FSDP) to two shards (HSDP)."""
    return [f"{copies} x {ranks // copies}" for copies in range(1, max(2, ranks // 2 + 1)) if ranks % copies == 0]


def num_shards(mesh: str) -> int:
    """Return the number of ranks that share the parameters in one of `meshes`."""
    return int(mesh.rpartition(" ")[2])


def verdict(needed_bytes: int, limit_bytes: int) -> str:
    """Say whether a need fits a limit, and by how much."""
    needed, limit = needed_bytes / MIB, limit_bytes / MIB
    over = abs(needed - limit)
    says = f"{over:.2f} MiB too much" if needed_bytes > limit_bytes else f"fits, {over:.2f} MiB are free"
    return f"{needed:.2f} of {limit:g} MiB: {says}."
