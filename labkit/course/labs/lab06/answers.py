"""The checks that compare the learner's findings with the planted faults."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable
from numbers import Real
from pathlib import Path
from typing import Any

from labkit.checkpoint import Checkpoint, Chunk, Reader, ValueEntry, open_checkpoint, verify
from labkit.course.labs.checks import hint_for, refuse, require_answers
from labkit.course.labs.lab06.cases import Cases
from labkit.errors import CheckpointError, ExerciseError, UnsolvedError


def check_short_file(cases: Cases, file: Any, missing_bytes: Any) -> str:
    """Check exercise 1: the file that is too short, and the number of missing bytes.

    Args:
        cases: The planted cases.
        file: The file's name in ``cases.short``.
        missing_bytes: How many bytes it lacks according to the index.

    Returns:
        A sentence with the numbers.

    Raises:
        ExerciseError: The answer is a different file or number.
    """
    require_answers(short_file=file, missing_bytes=missing_bytes)
    _require_file(cases.short, file)
    size_bytes = (cases.short / file).stat().st_size
    if file != cases._short_file:
        hint = "The index says where the last piece of each file ends: at its start plus its length."
        refuse(f"{file} has all of its {size_bytes:,} bytes.", "the file that ends too early.", hint)
    if not isinstance(missing_bytes, Real):
        refuse(f"missing_bytes is {reprlib.repr(missing_bytes)}, {_kind(missing_bytes)}, not a number.", "an int.")
    missing = _needed_bytes(cases.short, file) - size_bytes
    if missing_bytes != missing:
        hint = hint_for(
            missing_bytes,
            [
                (lambda number: number == size_bytes, "This is what the file has. What should it have?"),
                (lambda number: number == size_bytes + missing, "This is what it should have. How much of that is there?"),
            ],
            "The index says for each chunk where it starts and how long it is.",
        )
        refuse(f"{missing_bytes} missing bytes were found.", "what the index needs, less what the file has.", hint)
    return f"Solved: {file} has {size_bytes:,} bytes and lacks {missing:,}."


def _require_file(folder: Path, file: Any) -> None:
    names = sorted(path.name for path in folder.glob("*.distcp"))
    if isinstance(file, str) and file in names:
        return
    hint = hint_for(
        file,
        [
            (lambda given: given is None, "The answer is not set yet."),
            (lambda given: isinstance(given, list | tuple | set | frozenset | dict), "It is one file: give the name alone."),
            (
                lambda given: isinstance(given, str | Path) and str(given) == ".metadata",
                "The index is in order. Which data file?",
            ),
            (lambda given: isinstance(given, str | Path) and Path(given).name in names, "Give its name as a text, not its path."),
            (lambda given: not isinstance(given, str), f"A name is a text, and this is {_kind(file)}."),
        ],
    )
    refuse(f"{reprlib.repr(file)} is not a file of {folder.name}.", f"one of {', '.join(names)}.", hint)


def _kind(answer: object) -> str:
    name = "text" if isinstance(answer, str) else type(answer).__name__
    return f"a{'n' if name[0].lower() in 'aeiou' else ''} {name}"


def _needed_bytes(folder: Path, file: str) -> int:
    """Return the length that a file must have according to the index."""
    checkpoint = open_checkpoint(folder)
    pieces: list[Chunk | ValueEntry] = [chunk for entry in checkpoint.tensors.values() for chunk in entry.chunks]
    pieces += checkpoint.values.values()
    return max(piece.start + piece.length for piece in pieces if piece.file == file)


def check_not_finite(cases: Cases, names: Collection[str]) -> str:
    """Check exercise 2: the tensors of ``cases.not_finite`` that hold NaN or inf.

    Args:
        cases: The planted cases.
        names: The tensors' names in the checkpoint.

    Returns:
        A sentence with the names.

    Raises:
        ExerciseError: The answer lacks a tensor, or has one too many.
    """
    require_answers(poisoned=names)
    given = _texts(names)
    if given != cases._not_finite:
        missed, extra = cases._not_finite - given, given - cases._not_finite
        hint = hint_for(
            given,
            [
                (lambda found: not found, "verify looks for NaN and inf only when asked: finite=True."),
                (lambda found: bool(extra) and not missed, "These and others. Which of yours are finite in every element?"),
                (lambda found: {f"optimizer.state.{name}" for name in found} == cases._not_finite, _PREFIX),
                (lambda found: bool({name.removeprefix("model.") for name in found} & _parameters(cases._not_finite)), _MOMENT),
                (lambda found: bool(missed), "inf is not finite either, and the model is not the whole checkpoint."),
            ],
        )
        refuse(f"{len(given)} named, {len(given & cases._not_finite)} of them right.", f"{len(cases._not_finite)} tensors.", hint)
    return f"Solved: {' and '.join(sorted(given))}."


_PREFIX = "Name them as checkpoint.tensors does, with 'optimizer.state.' in front."
_MOMENT = "The parameter is finite. It is one of its moments that is not: name that tensor, as the checkpoint does."


def _parameters(moments: Iterable[str]) -> set[str]:
    return {name.removeprefix("optimizer.state.").rpartition(".")[0] for name in moments}


def check_lost_state(cases: Cases, names: Collection[str]) -> str:
    """Check exercise 3: the parameters of ``cases.lost_state`` that have no optimizer state.

    Args:
        cases: The planted cases.
        names: The parameters' names, as in ``model.named_parameters()``.

    Returns:
        A sentence with the number.

    Raises:
        ExerciseError: The answer lacks a parameter, or has one too many.
    """
    require_answers(without_moments=names)
    given = _texts(names)
    if given != cases._lost_state:
        right = given & cases._lost_state
        hint = hint_for(
            given,
            [
                (
                    lambda found: any(name.startswith("optimizer.") for name in found),
                    "Name the parameters, without 'optimizer.state.' in front.",
                ),
                (lambda found: any(name.startswith("model.") for name in found), "Name them as the model does, without 'model.'."),
                (lambda found: bool(_modules_among(found, _all_parameters(cases))), _MODULE),
                (lambda found: bool(found - _all_parameters(cases)), _NO_PARAMETER),
                (lambda found: bool(found - cases._lost_state), "Some of these have their moments: look for their exp_avg."),
                (lambda found: len(found) > 0, "There are more. Whole blocks are frozen together."),
            ],
            "verify reports no-state for each.",
        )
        refuse(f"{len(given)} named, {len(right)} of them right.", f"{len(cases._lost_state)} parameters.", hint)
    block = next(iter(given)).split(".")[1]
    return f"Solved: all {len(given)} parameters of block {block} would start again from zero moments."


_MODULE = "A block is not a parameter. Name each of its parameters, as model.named_parameters() does."
_NO_PARAMETER = "Not all of these are parameters. The head is the embedding under another name, and a rotary table is a buffer."


def _all_parameters(cases: Cases) -> set[str]:
    return _parameters(name for name in _tensor_names(cases.good) if name.endswith(".exp_avg"))


def _modules_among(names: Iterable[str], parameters: Collection[str]) -> set[str]:
    return {name for name in names if any(parameter.startswith(f"{name}.") for parameter in parameters)}


def check_stale_file(cases: Cases, file: Any) -> str:
    """Check exercise 4: the file of ``cases.stale`` that is from an earlier step.

    Args:
        cases: The planted cases.
        file: Its name.

    Returns:
        A sentence with the name.

    Raises:
        ExerciseError: The answer is a different file.
    """
    require_answers(stale_file=file)
    _require_file(cases.stale, file)
    if file != cases._stale_file:
        refuse(
            f"{file} is as it was at the save that the index describes.",
            "the file that is not.",
            "Compare each chunk with the export. A chunk knows its file.",
        )
    return f"Solved: {file} is from an earlier step, and no other."


def check_repair(cases: Cases, repaired: Any, model: Any) -> str:
    """Check exercise 5: a DCP checkpoint made from ``cases.wrapped`` that the model can load, bit for bit the good one.

    Args:
        cases: The planted cases.
        repaired: Its path.
        model: The model, whose names must be in it.

    Returns:
        A sentence with the number of compared tensors.

    Raises:
        ExerciseError: It does not exist, is not a DCP checkpoint, was not made from the case, or lacks names, or its bits differ.
    """
    path = _repaired_path(cases, repaired)
    checkpoint = _opened_dcp(path)
    report = verify(path, model=model, against=cases.good)
    # For verify, wrappers in names are only a warning, since it ignores them; but the model does not.
    faults = [finding for finding in report.findings if finding.severity == "error" or finding.code == "wrapped-name"]
    if faults:
        kinds = sorted({finding.code for finding in report.findings})
        hint = hint_for(
            kinds,
            [
                (
                    lambda found: "wrapped-name" in found,
                    "Names still carry the wrapper's, including those of the optimizer's state.",
                ),
                (lambda found: "other-bits" in found, "The names are right but the numbers are not. Was it made from the case?"),
                (lambda found: "no-state" in found, "The optimizer's state belongs to it."),
            ],
            faults[0].line(),
        )
        refuse(f"verify finds {len(faults)} faults: {', '.join(kinds)}.", "none.", hint)
    compared = report.checked["compared tensors"]
    moments = sum(name.startswith("optimizer.") for name in _tensor_names(path))
    if not moments:
        refuse("It holds no optimizer state.", "weights and moments.", "Which part of the case was left out on the way?")
    _require_made_of(cases.wrapped, checkpoint)
    return f"Solved: {compared} tensors under the model's own names, {moments} of them moments, equal bit for bit."


def _repaired_path(cases: Cases, repaired: Any) -> Path:
    if not isinstance(repaired, str | Path):
        hint = "migrate returns what it wrote. repaired has to be the place where it wrote." if repaired is not None else ""
        refuse(f"repaired is {_kind(repaired)}, not a path.", "the path of the new checkpoint.", hint)
    path = Path(repaired)
    if path.resolve() in (cases.good.resolve(), cases.wrapped.resolve()):
        refuse(f"{path.name} is one of the given checkpoints.", "a new folder, made from the case.")
    if not path.exists():
        raise UnsolvedError(f"there is nothing at {path} yet. Fill in the exercise's cell and run it.")
    return path


def _opened_dcp(path: Path) -> Checkpoint:
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        refuse(f"{path.name} does not open: {error}", "a folder that dcp.load reads.")
    if checkpoint.kind != "dcp":
        hint = {"safetensors": "Safetensors hold the model only; DCP holds both."}.get(
            checkpoint.kind, "migrate goes by the destination's suffix: without one it writes DCP's folder."
        )
        refuse(f"dcp.load does not read {path.name}.", "a folder with DCP's .metadata in it.", hint)
    return checkpoint


def _require_made_of(case: Path, checkpoint: Checkpoint) -> None:
    """Require the values that only the case has, outside model and optimizer."""
    original = open_checkpoint(case)
    with Reader(original) as given, Reader(checkpoint) as made:
        for name, entry in original.values.items():
            if entry.section == "other" and (name not in checkpoint.values or made.value(name) != given.value(name)):
                refuse(
                    f"The tensors are right, but it lacks the case's {name!r}, {given.value(name)!r}.",
                    "everything that the case holds.",
                    "Was it made from the case, and not from the good checkpoint?",
                )


def _tensor_names(path: Path) -> list[str]:
    return list(open_checkpoint(path).tensors)


def _texts(names: Collection[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise ExerciseError(f"one text is not a set of names. Write {{{names!r}}}.")
    if not isinstance(names, Iterable):
        raise ExerciseError(f"{names!r} is not a set of names.")
    return frozenset(map(str, names))
