"""The versions of torch that can read a ``.metadata`` file, and the forms that the others need.

torch unpickles ``.metadata``, so it needs the classes in the modules that the pickle names, with a ``__setstate__`` that accepts
the pickled state. Since torch 2.3 the modules have stayed the same, and the state of only one class has changed:
``TensorProperties`` is pickled as a tuple, of five fields up to torch 2.14, and of six, with the strides, from 2.15 on. torch 2.15
reads both.
"""

from __future__ import annotations

import copyreg
import importlib
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any

import torch

from labkit.checkpoint.errors import CheckpointError
from labkit.checkpoint.index.model import Checkpoint
from labkit.checkpoint.pickles.pickle_records import Record

METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_OLDEST = (2, 3)
# Each number of fields in a tensor's properties, and the first version of torch that reads it.
_SINCE: Mapping[int, tuple[int, int]] = {5: _OLDEST, 6: (2, 15)}
_USUAL_CLASSES = {f"{METADATA_MODULE}.{name}" for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")}
_USUAL_CLASSES |= {f"{METADATA_MODULE}.{name}" for name in ("TensorProperties", "StorageMeta")}
# Checks import classes only from these modules, and nothing else that a file names.
_ASKED = (METADATA_MODULE, "torch.distributed._shard.sharded_tensor.metadata", "pathlib", "pathlib._local")


def note_form(checkpoint: Checkpoint, metadata: Mapping[str, Any]) -> None:
    """Record in a checkpoint's ``metadata`` how many fields its properties have, which torch reads that, and any odd classes."""
    forms: dict[int | None, None] = {}
    classes: set[str] = set()
    for described in metadata["state_dict_metadata"].values():
        properties = described.state.get("properties")
        classes.add(described.name)
        if properties is not None:
            classes.add(properties.name)
            state = properties.state.get("state")
            forms[len(state) if isinstance(state, tuple) else None] = None
    about = metadata.get("storage_meta")
    if isinstance(about, Record):
        classes |= {item.name for item in (about, about.state.get("checkpoint_id")) if isinstance(item, Record)}
    checkpoint.metadata["property_fields"] = list(forms)
    checkpoint.metadata["read_by"] = _read_by(list(forms))
    if odd := sorted(classes - _USUAL_CLASSES):
        checkpoint.metadata["classes"] = odd


def _read_by(forms: list[int | None]) -> str:
    if not all(form in _SINCE for form in forms):
        return f"no torch that labkit knows, the newest of which is {_text(max(_SINCE.values()))}"
    return f"torch >= {_text(max((_SINCE[form] for form in forms if form), default=_OLDEST))}"


def is_new(checkpoint: Checkpoint) -> bool:
    """Return whether any torch since 2.3 cannot read a checkpoint's index."""
    return any(form != min(_SINCE) for form in checkpoint.metadata.get("property_fields", ()))


def refusals(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield the reasons why the installed torch and Python cannot read a checkpoint's index: the finding's code and a sentence.

    To find out, pass torch's own class a state with that many fields. Every torch since 2.3 reads five, so five is not tried.
    """
    for form in checkpoint.metadata.get("property_fields", ()):
        reason = None if form == min(_SINCE) else _refuses_fields(form)
        if reason is not None:
            how = "are no tuple" if form is None else f"have {form} fields"
            read_by = checkpoint.metadata["read_by"]
            yield (
                "newer-torch",
                f"a tensor's properties {how} there, on which the torch here ({torch.__version__}) raises {reason}. It is read by "
                f"{read_by}. For the torch here, write it anew: labkit checkpoint reshard, or migrate",
            )
    for whole in checkpoint.metadata.get("classes", ()):
        module, _, name = whole.rpartition(".")
        reason = _refuses_class(module, name) if module in _ASKED else None
        if reason is not None:
            of_python = module.startswith("pathlib")
            here = f"Python here ({sys.version.split()[0]})" if of_python else f"torch here ({torch.__version__})"
            yield (
                "newer-python" if of_python else "newer-torch",
                f"it names {whole}, on which the {here} raises {reason}. Write it anew: labkit checkpoint reshard, or migrate",
            )


def _refuses_fields(count: int | None) -> str | None:
    from torch.distributed.checkpoint.metadata import TensorProperties

    own = TensorProperties(dtype=torch.float32).__getstate__()
    state = {} if count is None else (*own, *([None] * count))[:count]
    try:
        TensorProperties.__new__(TensorProperties).__setstate__(state)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _refuses_class(module: str, name: str) -> str | None:
    try:
        found = getattr(importlib.import_module(module), name)
        if module.startswith("pathlib"):
            found("x")  # a path class of another system can be imported but not instantiated
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def fields_for(version: str) -> int:
    """Return the number of fields of a tensor's properties in a version of torch, such as ``2.13``.

    Raises:
        CheckpointError: The text is no version, or that torch has the classes in other modules.
    """
    match = re.match(r"(\d+)\.(\d+)(\.|\+|$)", version)
    if match is None:
        raise CheckpointError(f"for_torch={version!r} (--for-torch) is no version of torch. Write it like 2.13.")
    wanted = int(match[1]), int(match[2])
    if wanted < _OLDEST:
        raise CheckpointError(
            f"for_torch={version!r} (--for-torch): torch before {_text(_OLDEST)} keeps the classes of .metadata elsewhere. "
            "For it, write safetensors or a torch.save file, with --to."
        )
    return max(fields for fields, since in _SINCE.items() if since <= wanted)


def form_note(fields: int | None) -> list[str]:
    """Return a list with one note if the installed torch cannot read properties with that many fields; else an empty list."""
    if fields is None or _refuses_fields(fields) is None:
        return []
    here = f"the torch here ({torch.__version__})"
    return [f"its index is for {_read_by([fields])}, as asked: {here} cannot read it, and verify says so here"]


def dump(metadata: Any, file: IO[bytes], fields: int | None) -> None:
    """Pickle DCP's metadata with ``fields`` fields in each tensor's properties; None for the installed torch's own number."""
    from torch.distributed.checkpoint.metadata import TensorProperties

    def reduce(properties: TensorProperties) -> tuple[Any, ...]:
        state = properties.__getstate__()
        return copyreg.__newobj__, (TensorProperties,), (*state, *([None] * (fields or 0)))[:fields]  # type: ignore[attr-defined]

    pickler = pickle.Pickler(file)
    if fields is not None:
        pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: reduce}
    pickler.dump(metadata)


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
