"""Comparison of a checkpoint with a model, or with another checkpoint of any kind and sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from labkit.base.lookup import FunctionNotFoundError, find_function
from labkit.checkpoint.checks.findings import Report
from labkit.checkpoint.checks.name_findings import NOT_THE_SAME, report_alone, report_misfit
from labkit.checkpoint.checks.verify_data import Progress, each
from labkit.checkpoint.contents.flat import ParameterList
from labkit.checkpoint.contents.source_contents import keyed_by_rank
from labkit.checkpoint.contents.sources import EntrySource
from labkit.checkpoint.contents.ties import equal
from labkit.checkpoint.data.rank_shares import is_flat
from labkit.checkpoint.data.read import Reader, same_bits
from labkit.checkpoint.errors import CheckpointError
from labkit.checkpoint.index.model import Checkpoint, Chunk, TensorEntry
from labkit.checkpoint.index.names import canonical_names, flat_key, fqn_of, match_names
from labkit.checkpoint.index.sections import Nest, model_nests, name_in, nest_of
from labkit.checkpoint.wording import counted, listed

ModelSource = nn.Module | str | Callable[[], nn.Module]


def build_model(model: ModelSource | None) -> nn.Module | None:
    """Return a given model, or build it on the meta device.

    Args:
        model: A module, a function that builds one, or the text ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``, imported from the
            current directory. This runs the user's own code, but none from a checkpoint.

    Raises:
        CheckpointError: The module or function does not exist or fails, or the function does not return a module.
    """
    if model is None or isinstance(model, nn.Module):
        return model
    try:
        builder = find_function(model) if isinstance(model, str) else model
    except FunctionNotFoundError as error:
        raise CheckpointError(str(error)) from error
    name = model if isinstance(model, str) else getattr(model, "__qualname__", type(model).__name__)
    if not callable(builder):
        raise CheckpointError(
            f"model={model!r} is not a model. Pass a torch.nn.Module, a function that builds one, or 'FILE.py:FUNCTION'."
        )
    try:
        with torch.device("meta"):
            built = builder()
    except (Exception, SystemExit) as error:
        raise CheckpointError(
            f"{name} raised {type(error).__name__}: {error}. It is called without arguments, on torch's meta device: "
            "it should only build the model, and load no weights."
        ) from error
    if not isinstance(built, nn.Module):
        raise CheckpointError(f"{name} returned {type(built).__name__}, not a torch.nn.Module")
    try:
        ParameterList.of(built)
    except Exception as error:
        raise CheckpointError(
            f"{name} built a model whose parameters cannot be listed ({type(error).__name__}: {error}). Lazy modules need a first "
            "forward to have shapes: build it with the sizes written out."
        ) from error
    return built


def model_entries(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, TensorEntry]:
    """Return a checkpoint's model tensors by their names in the model, without the keys of the dicts around it.

    If several nests may be the model, use the one that shares the most names with it.
    """
    nests: dict[Nest, dict[str, TensorEntry]] = {(): {entry.key: entry for entry in checkpoint.section("model")}}
    for entry in checkpoint.section("model"):
        if nest := nest_of(entry.path):
            nests.setdefault(nest, {})[name_in(entry.path)] = entry
    expected = list(names)
    return max(nests.values(), key=lambda found: (len(match_names(found, expected)), -len(found)))


def report_flat(checkpoint: Checkpoint, report: Report) -> bool:
    """Return whether a checkpoint has flat parameters; if so, add a finding, because they cannot be compared."""
    flat = [entry.key for entry in checkpoint.section("model") if is_flat(entry)]
    if flat and not any(finding.code == "flat-parameters" and finding.where == str(checkpoint.path) for finding in report.findings):
        report.error(
            "flat-parameters",
            checkpoint.path,
            f"it holds {counted(len(flat), 'flat parameter')} of FSDP1 (a LOCAL state dict), whose parts have no names and shapes. "
            "Migrate it, and verify the result: labkit checkpoint migrate SRC DST --model FILE.py:FUNCTION",
            "DCP and FSDP2 find none of the model's parameters",
        )
    return bool(flat)


def check_model(checkpoint: Checkpoint, model: nn.Module, report: Report) -> None:
    """Check names in both directions, shapes and dtypes against a model."""
    expected: Mapping[str, torch.Tensor] = {
        name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)
    }
    have = model_entries(checkpoint, expected)
    partners = match_names(have, expected)
    matched = {partner: have[name] for name, partner in partners.items()}
    tied = ParameterList.of(model).tied
    # One name of a tied parameter is enough.
    fqn = fqn_of(model)
    there = {tied.get(name, name) for name in map(fqn, matched)}
    missing = [name for name in expected if name not in matched and tied.get(fqn(name), fqn(name)) not in there]
    unexpected = [name for name in have if name not in partners]
    report_misfit(checkpoint, expected, missing, unexpected, report)
    for name, entry in matched.items():
        report.count("model keys")
        want = expected[name]
        if tuple(want.shape) != entry.shape:
            report.error(
                "wrong-shape",
                name,
                f"{entry.shape} in the checkpoint, {tuple(want.shape)} in the model",
                "copy_() broadcasts where it can",
            )
        elif want.dtype != entry.dtype:
            report.warning(
                "other-dtype",
                name,
                f"{entry.dtype} in the checkpoint, {want.dtype} in the model",
                "DCP casts; too large values become inf",
            )


def check_ties(checkpoint: Checkpoint, model: nn.Module, report: Report) -> None:
    """Check that all names of a tied parameter have the same data, and that no other names share bytes. Reads tied tensors."""
    fqn = fqn_of(model)
    names = [fqn(name) for name in model.state_dict()]
    have = model_entries(checkpoint, names)
    tied = ParameterList.of(model).tied
    found = {partner: have[name] for name, partner in match_names(have, names).items()}
    by_key = {entry.key: name for name, entry in found.items()}
    with Reader(checkpoint) as reader:
        for name, owner in tied.items():
            left, right = found.get(name), found.get(owner)
            if left is None or right is None or (left.tied_to or left.key) == (right.tied_to or right.key):
                continue
            try:
                same = equal(reader, EntrySource(left), EntrySource(right))
            except CheckpointError:
                continue  # another check reports what cannot be read
            if not same:
                what = f"it and {owner} are one tensor in the model, and differ in the checkpoint"
                report.error("untied", name, what, "the one that is loaded last is used for both")
    for name, entry in found.items():
        first = by_key.get(entry.tied_to or entry.key, name)
        if tied.get(first, first) != tied.get(name, name):
            what = f"it and {first} are one tensor in the checkpoint, and two in the model"
            report.warning("tied", name, what, "both begin with the same values")


def trainable_names(model: nn.Module) -> set[str]:
    """Return the model's trainable parameters by canonical name."""
    fqn = fqn_of(model)
    return {fqn(name) for name, parameter in model.named_parameters() if parameter.requires_grad}


def comparable(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Return tensors by names that are the same in every kind of checkpoint: without wrappers, and without the keys around a model.

    If several nests may be the model, each keeps those keys.
    """
    nests = model_nests(checkpoint)
    names: dict[str, TensorEntry] = {}
    for nest in nests:
        inside = {name_in(entry.path): entry for entry in checkpoint.section("model") if nest_of(entry.path) == nest}
        for raw, name in canonical_names(inside, checkpoint.path).items():
            names[name if len(nests) == 1 else ".".join([*map(str, nest), name])] = inside[raw]
    optimizer = {_optimizer_name(entry): entry for entry in checkpoint.section("optimizer")}
    for raw, name in canonical_names(optimizer, checkpoint.path).items():
        names[f"optimizer.{name}"] = optimizer[raw]
    return names | {entry.key: entry for entry in checkpoint.section("other")}


def _as_keyed(
    checkpoint: Checkpoint, names: Mapping[str, TensorEntry], others: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return one side's tensors; if the other side keys copies by rank, as a migration does, key this side's likewise."""
    result: dict[str, TensorEntry] = {}
    for name, entry in names.items():
        split: dict[str, TensorEntry] = {}
        if entry.section == "other" and entry.replicas and name not in others:
            split = {
                flat_key(path): replace(entry, path=path, key=flat_key(path), chunks=table, replicas=())
                for path, table in keyed_by_rank(checkpoint, entry)
            }
        result |= split if split and split.keys() <= others.keys() else {name: entry}
    return result


def _optimizer_name(entry: TensorEntry) -> str:
    # The keys before "state" are the user's choice (optim, optimizer); FQNs after it may contain wrappers.
    keys = [str(part) for part in entry.path]
    return ".".join(keys[keys.index("state") + 1 :]) if "state" in keys else entry.key.removeprefix("state.")


def _alone(names: Mapping[str, TensorEntry], others: Mapping[str, TensorEntry]) -> list[str]:
    """Return the names that the other side lacks, except names of tied tensors that it has under another name."""
    shared = {entry.tied_to or entry.key for name, entry in names.items() if name in others}
    return [name for name, entry in names.items() if name not in others and (entry.tied_to or entry.key) not in shared]


def check_against(checkpoint: Checkpoint, other: Checkpoint, report: Report, workers: int, progress: Progress) -> None:
    """Check chunk by chunk that another checkpoint has the same bits."""
    mine, theirs = comparable(checkpoint), comparable(other)
    mine, theirs = _as_keyed(checkpoint, mine, theirs), _as_keyed(other, theirs, mine)
    for section in {entry.section for entry in (*mine.values(), *theirs.values())}:
        for side, others, path in ((mine, theirs, other.path), (theirs, mine, checkpoint.path)):
            alone = [name for name, entry in side.items() if entry.section == section]
            if alone and not any(entry.section == section for entry in others.values()):
                report.unchecked.append(f"{path} has no {section} tensors, so {len(alone)} of the other side are not compared")
                for name in alone:
                    del side[name]
    report_alone(checkpoint, other, _alone(mine, theirs), _alone(theirs, mine), report)
    jobs: list[tuple[str, TensorEntry, TensorEntry, Chunk]] = []
    for name in mine.keys() & theirs.keys():
        left, right = mine[name], theirs[name]
        report.count("compared tensors")
        if (left.shape, left.dtype) != (right.shape, right.dtype):
            report.error(
                "wrong-shape",
                name,
                f"{left.shape} {left.dtype} here, {right.shape} {right.dtype} in {other.path}",
                NOT_THE_SAME,
            )
            continue
        jobs.extend((name, left, right, chunk) for chunk in left.chunks)
    different: set[str] = set()
    unreadable: dict[str, dict[str, str]] = {}

    def compare(job: tuple[str, TensorEntry, TensorEntry, Chunk], reader: Reader) -> None:
        name, left, right, chunk = job
        try:
            with Reader(other) as theirs_reader:
                same = same_bits(reader.chunk(left, chunk), theirs_reader.box(right, chunk.offsets, chunk.sizes))
        except CheckpointError as error:
            unreadable.setdefault(getattr(error, "path", name), {})[name] = str(error)
            return
        if not same and name not in different:
            different.add(name)
            report.error("other-bits", name, f"its bits differ from {other.path}", NOT_THE_SAME)
        progress(chunk.numel * left.dtype.itemsize)

    each(jobs, compare, checkpoint, workers)
    known = {finding.where for finding in report.findings}
    for where, names in unreadable.items():
        first = next(iter(names.values())).removeprefix(f"{where}: ")
        if where not in known:
            report.error("unreadable", where, f"{counted(len(names), 'tensor')} ({listed([*names])}): {first}", "a load fails")
