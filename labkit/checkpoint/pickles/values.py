"""Values in a training state. What ``save`` accepts, ``load`` returns equal and of the same type; ``save`` refuses all others.

==============================================  ==================================================================================
a value                                         its restored form
==============================================  ==================================================================================
None, bool, int, float, complex, str, bytes,    the same to the last bit: any int, -0.0, every NaN, lone surrogates
bytearray, torch.dtype, torch.device
list, tuple, torch.Size, set, frozenset         the same items in the same order (sets have none)
dict, OrderedDict, Counter                      equal; keys and items of sets are values of the first row (an int of at most
                                                512 bits), or tuples and frozensets of them. A dict need not keep its order
numpy arrays and scalars of bool, int8 to       the same dtype, byte order, shape and bits. An array comes back in C order
uint64, float16 to float64, complex64, 128
torch.Tensor                                    the same dtype, shape and bits, on the CPU, contiguous and without
                                                ``requires_grad``; conjugate and negative bits are applied
==============================================  ==================================================================================

Only these exact classes are accepted. A subclass (an Enum of ints, a namedtuple, a Parameter, ``np.matrix``) would be restored as
a different class, and is refused. So are defaultdict, deque, paths, dates, namespaces, ranges, arrays of text, dates or objects,
tensors that are sparse, quantized, jagged or on meta, sharded tensors inside a value, and nesting beyond 50 levels, which also
covers a value that contains itself. An attribute set on an OrderedDict is refused, except ``_metadata``, which torch sets and which
is not kept. If one object was in two places, each place gets an equal object of its own.

Two values agree if they have the same types and are identical to the last bit. Order matters in an OrderedDict, but not in a dict,
Counter or set.
"""

from __future__ import annotations

import dataclasses
import struct
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import xxhash

from labkit.checkpoint.errors import STATE, UnsavableStateError
from labkit.checkpoint.files.plain_tensors import plain_tensor, tensor_bytes, to_cpu
from labkit.checkpoint.pickles.pickle_budget import MOST_KEY_BITS

MAX_DEPTH = 50  # the reader accepts a few levels more

_PAYLOADS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"",
    bool: lambda value: b"1" if value else b"0",
    int: lambda value: value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True),
    float: struct.Struct("<d").pack,
    complex: lambda value: struct.pack("<dd", value.real, value.imag),
    str: lambda value: value.encode("utf-8", "surrogatepass"),
    bytes: bytes,
    torch.dtype: lambda value: str(value).encode(),
    torch.device: lambda value: str(value).encode(),
}
_SEQUENCES = (list, tuple, torch.Size, set, frozenset)
_MAPPINGS = (dict, OrderedDict, Counter)
_NUMBERS = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
_LONG = 32

# A refused value gets the advice of the first class here that it belongs to.
_WAYS_OUT = {
    "labkit.checkpoint.state.state.PerRank": "PerRank has to be the value of a key, in a dict of the state with str or int keys",
    "torch.nn.modules.module.Module": "give it a key of its own, in a dict of the state with str or int keys",
    "torch.optim.optimizer.Optimizer": "give it a key of its own, in a dict of the state with str or int keys",
    "torch.distributed.tensor.DTensor": "give it a key of its own, in a dict of the state with str or int keys",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor": "give it a key of its own, in a dict of the state",
    "torch.Tensor": "save tensor.detach(), or for a subclass the plain tensors that it consists of",
    "torch._C.Generator": "save generator.get_state()",
    "_io.BytesIO": "save buffer.getvalue()",
    "pathlib.PurePath": "save str(path)",
    "datetime.timedelta": "save delta.total_seconds()",
    "datetime.date": "save date.isoformat()",
    "datetime.time": "save time.isoformat()",
    "collections.deque": "save list(deque)",
    "argparse.Namespace": "save vars(namespace)",
    "types.SimpleNamespace": "save vars(namespace)",
    "enum.Enum": "save member.value",
    "builtins.range": "save list(range)",
    "builtins.slice": "save (slice.start, slice.stop, slice.step)",
    "numpy.ndarray": "save array.tolist(), or np.asarray(array) with a dtype of numbers",
    "numpy.str_": "save str(value)",
    "numpy.generic": "save value.item()",
    **{
        f"builtins.{name}": f"save {name}(value)"
        for name in ("int", "float", "complex", "str", "bytes", "bytearray", "list", "tuple", "set", "frozenset", "dict")
    },
}


def snapshot(value: Any, *, copy: bool = False) -> Any:
    """Return a value in the form that is written: new containers, and tensors on the CPU.

    Args:
        value: The value.
        copy: Whether tensors and arrays must be independent of the live ones.

    Raises:
        UnsavableStateError: Something in it would not be restored unchanged; the message begins with its place in the value.
    """
    known: dict[int, Any] = {}

    def turn(item: Any, place: str, depth: int) -> Any:
        result: Any
        kind = type(item)
        if kind in _PAYLOADS:
            return item
        if depth > MAX_DEPTH:
            raise _refusal(place, f"is nested deeper than {MAX_DEPTH} levels, or contains itself")
        if id(item) in known:
            return known[id(item)]
        if kind in _MAPPINGS:
            if lost := lost_attributes(item):
                raise _refusal(place, f"is a {kind.__name__} with an attribute {lost[0]!r}; save that under a key of its own")
            pairs = {
                _hashable(key, place): part if type(part) in _PAYLOADS else turn(part, f"{place}[{key!r:.40}]", depth + 1)
                for key, part in item.items()
            }
            result = pairs if kind is dict else kind(pairs)
        elif kind in (set, frozenset):
            result = kind(_hashable(part, place) for part in item)
        elif kind in _SEQUENCES:
            result = kind(
                [part if type(part) in _PAYLOADS else turn(part, f"{place}[{index}]", depth + 1) for index, part in enumerate(item)]
            )
        else:
            result = _leaf(item, place, copy)
        known[id(item)] = result
        return result

    return turn(value, "", 0)


def _leaf(item: Any, place: str, copy: bool) -> Any:
    kind = type(item)
    if kind is bytearray:
        return bytearray(item)
    if kind is torch.Tensor:
        try:
            return to_cpu(plain_tensor(item), copy=copy).contiguous()
        except UnsavableStateError as error:
            raise _refusal(place, error.problems[0]) from None
    if kind is np.ndarray and _is_number(item.dtype):
        return item.copy() if copy else item
    if isinstance(item, np.generic) and _is_number(item.dtype) and kind is np.dtype(item.dtype.str).type:
        return item
    raise _refusal(place, _what_and_way_out(item))


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.metadata is None and dtype.newbyteorder("=") in _NUMBERS


def _hashable(key: Any, place: str) -> Any:
    if type(key) in (tuple, frozenset):
        for part in key:
            _hashable(part, place)
    elif type(key) is int and key.bit_length() > MOST_KEY_BITS:
        raise _refusal(place, f"has a key or item of {key.bit_length():,} bits, and at most {MOST_KEY_BITS} are read; save str(it)")
    elif type(key) not in _PAYLOADS:
        raise _refusal(place, f"has a key or item {key!r:.60} that {_what_and_way_out(key)}")
    return key


def lost_attributes(mapping: Any) -> list[str]:
    """Return the attributes of an OrderedDict or a Counter that would not be restored, without torch's ``_metadata``."""
    return sorted(getattr(mapping, "__dict__", {}).keys() - {"_metadata"})


def _refusal(place: str, problem: str) -> UnsavableStateError:
    return UnsavableStateError(STATE, [f"{place} {problem}".lstrip()])


def _what_and_way_out(value: Any) -> str:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    if kind is np.ndarray:
        name += f" of dtype {value.dtype}"
    names = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
    way_out = next((text for base, text in _WAYS_OUT.items() if base in names), "")
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not way_out:
        way_out = "save dataclasses.asdict(value)"
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") and not way_out:
        way_out = "give it a key of its own, in a dict of the state with str or int keys"
    default = "save plain data, or give an object with state_dict and load_state_dict a key of its own"
    return f"is of type {name}, which would not come back; {way_out or default}"


def digest(value: Any) -> bytes:
    """Return a hash of a value from :func:`snapshot`, which depends on types and on every bit. Equal values have equal hashes."""
    return xxhash.xxh3_128_digest(_canonical(value, {}))


def _canonical(value: Any, known: dict[int, bytes]) -> bytes:
    kind = type(value)
    payload = _PAYLOADS.get(kind)
    if payload is not None:
        data = payload(value)
    else:
        if id(value) not in known:
            known[id(value)] = _content(value, known)
        data = known[id(value)]
    return b"%s:%d:%s" % (kind.__name__.encode(), len(data), data)


def _content(value: Any, known: dict[int, bytes]) -> bytes:
    """Return the hash of a container, an array or a tensor; shared items are hashed only once."""
    kind, total = type(value), xxhash.xxh3_128()
    if kind in _MAPPINGS:
        pairs = (_canonical(key, known) + _canonical(item, known) for key, item in value.items())
        _update(total, pairs if kind is OrderedDict else sorted(pairs))
    elif kind in (set, frozenset):
        _update(total, sorted(_canonical(item, known) for item in value))
    elif kind in _SEQUENCES:
        numbers = _numbers(value)
        _update(total, (_canonical(item, known) for item in value) if numbers is None else [numbers])
    elif kind is bytearray:
        total.update(value)
    elif kind is torch.Tensor:
        total.update(f"{value.dtype}{tuple(value.shape)}".encode())
        total.update(tensor_bytes(value).numpy().data)
    else:
        total.update(f"{value.dtype.str}{value.shape}".encode())
        total.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return total.digest()


def _update(total: Any, parts: Iterable[bytes]) -> None:
    for part in parts:
        total.update(part)


def _numbers(items: Any) -> bytes | None:
    """Return many floats, or many ints of up to 64 bits, as bytes; else None. Histories and permutations may have a million."""
    kinds = set(map(type, items)) if len(items) >= _LONG else set()
    if kinds == {float}:
        return b"floats " + array("d", items).tobytes()
    if kinds == {int}:
        try:
            return b"ints " + array("q", items).tobytes()
        except OverflowError:
            return None
    return None
