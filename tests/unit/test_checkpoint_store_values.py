"""load returns every value that save accepts, equal and of the same type; others are refused by name before any write."""

from __future__ import annotations

import argparse
import collections
import copy
import datetime as dt
import decimal
import enum
import io
import pathlib
import re
import struct
import types
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from labkit import checkpoint
from labkit.checkpoint import PerRank
from labkit.checkpoint.errors import CheckpointMismatchError, CheckpointWriteError, FQNMismatchError, UnsavableStateError
from labkit.checkpoint.index import manifest
from labkit.checkpoint.pickles.values import MAX_DEPTH, digest, snapshot


def same(left: Any, right: Any) -> bool:
    """Return whether two values have the same types and bits. It shares no code with the code under test."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        here, there = (item.detach().resolve_conj().resolve_neg().contiguous() for item in (left, right))
        here, there = (item.as_strided((item.numel(),), (1,)).view(torch.uint8) for item in (here, there))
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(here, there)
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        if len(left) != len(right) or (type(left) is OrderedDict and list(left) != list(right)):
            return False
        return all(any(same(key, other) and same(item, right[other]) for other in right) for key, item in left.items())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, set | frozenset):
        return len(left) == len(right) and all(any(same(item, other) for other in right) for item in left)
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    return bool(left == right)


class Holder:
    """An object whose state is whatever it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def reloaded(folder: Path, value: Any) -> Any:
    """Save a value as an object's state, and load it into an object without a state."""
    checkpoint.save(folder, {"held": Holder(value)}, 1)
    state = {"held": Holder(None)}
    checkpoint.load(folder, state)
    return state["held"].state


# -- what comes back -----------------------------------------------------------------------------------------------------

LARGE = np.arange(24, dtype=np.int64).reshape(2, 3, 4)
SNAN = struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf4\xff")[0]
NESTED: list[Any] = [1]
for _ in range(MAX_DEPTH - 1):
    NESTED = [NESTED]
SHARED = [1.5]
VALUES = {
    "nothing": None,
    "a bool": True,
    "an int beyond 64 bits": -(1 << 70_000) + 1,
    "minus zero": -0.0,
    "a NaN with a payload": SNAN,
    "a complex of minus zero and NaN": complex(-0.0, float("nan")),
    "text with a lone surrogate": "a\ud800",
    "no bytes": b"",
    "all bytes": bytes(range(256)),
    "no bytearray": bytearray(),
    "a bytearray": bytearray(b"\x80a"),
    "a dtype": torch.bfloat16,
    "a device": torch.device("cuda", 3),
    "a size": torch.Size([2, 3]),
    "a size in a list": [torch.Size([]), ()],
    "a tuple of mixed kinds": (1, True, 1.0, "1", b"1", None, (), [], {}, set(), frozenset()),
    "sets": [{1, "1", b"1", None, (1, frozenset({2.0}))}, frozenset({-0.0})],
    "keys of many kinds": [{1: "a", "1": "b", (True, None): "c", b"": "d", 2.5: "e", frozenset({1}): "f", torch.int8: "g"}],
    "a dict with int keys": {3: 0.5, -1: [1]},
    "a dict with a bool key": {True: 1},
    "keys with dots": {"a.b": 1, "a": {"c.": 2, "": 3}},
    "empty containers in containers": {"a": {}, "b": [], "c": {"d": {}}, "e": [[], {}]},
    "an empty dict": {},
    "an empty OrderedDict": OrderedDict(),
    "an OrderedDict": OrderedDict([("b", 1), ("a", OrderedDict([(2, "x"), (1, "y")]))]),
    "an OrderedDict of tensors": {"m": OrderedDict([("b", torch.ones(1)), ("a", OrderedDict([("d", 2), ("c", torch.zeros(1))]))])},
    "a Counter": {"milestones": Counter({5: 1, 10: 0, 7: -2})},
    "an empty Counter": Counter(),
    "a list that occurs twice": [SHARED, SHARED],
    "deep nesting": NESTED,
    "an empty array": np.zeros((0, 3), dtype=np.float32),
    "an array without dims": np.array(2.5, dtype=">f8"),
    "a big-endian array": np.arange(3, dtype=">i2"),
    "an array in Fortran order": np.asfortranarray(LARGE),
    "a strided array": LARGE[:, ::-2, ::2],
    "arrays of each kind": [np.zeros(2, dtype=name) for name in ("?", "i1", "u8", "f2", "f4", "c8", "c16")],
    "numpy scalars": [np.bool_(True), np.uint64(2**64 - 1), np.float16(-0.0), np.float64("nan"), np.complex64(1j)],
    "an array of many": np.arange(5000.0),
    "tensors in a tuple": (torch.ones(2, 0), torch.tensor(3, dtype=torch.int8), torch.tensor([SNAN, -0.0], dtype=torch.float64)),
    "tensors in a dict with int keys": {0: {"exp_avg": torch.ones(2)}, 1: {"exp_avg": torch.zeros(2)}},
    "tensors in lists": [torch.ones(2), [torch.zeros(1), {"a": (torch.ones(1),)}], None],
    "views": (torch.arange(8.0)[::2], torch.ones(1).expand(3), torch.arange(6).reshape(2, 3).T),
    "lazy bits": (torch.tensor([1 + 2j]).conj(), torch._neg_view(torch.ones(2)), torch.tensor([1 + 2j]).conj().imag),
    "lazy bits under names": {"a": torch.tensor([1 + 2j]).conj(), "b": torch._neg_view(torch.ones(2))},
}


@pytest.mark.parametrize("name", VALUES)
def test_b_a_value_comes_back_equal_and_of_the_same_type(tmp_path: Path, name: str) -> None:
    value = VALUES[name]
    assert same(reloaded(tmp_path / "object", value), value)
    state = {"value": value, "mine": PerRank(value), "listed": [value, torch.ones(1)]}
    checkpoint.save(tmp_path / "state", state, 1)
    target = {"value": blank(value), "mine": PerRank(blank(value)), "listed": [blank(value), torch.zeros(1)]}
    checkpoint.load(tmp_path / "state", target)
    assert same(target["value"], value)
    assert same(target["mine"].value, value)
    assert same(target["listed"][0], value)


def blank(value: Any) -> Any:
    """The same names with other values, because the nested dicts and lists of a state are the caller's own."""
    if type(value) in (dict, OrderedDict) and value and all(type(key) in (str, int) for key in value):
        return type(value)((key, blank(item)) for key, item in value.items())
    if isinstance(value, list) and opens(value):
        return [blank(item) for item in value]
    return torch.zeros_like(value.resolve_conj().resolve_neg()) if isinstance(value, torch.Tensor) else "not loaded"


def opens(value: Any) -> bool:
    if type(value) in (dict, OrderedDict):
        return bool(value) and all(type(key) in (str, int) for key in value)
    return isinstance(value, torch.Tensor) or (type(value) is list and any(map(opens, value)))


@pytest.mark.parametrize("lazily", [False, True])
def test_g_lazy_bits_of_what_is_saved_and_of_what_is_filled_are_worked_out(tmp_path: Path, lazily: bool) -> None:
    plain = {"c": torch.tensor([1 - 2j, 3 + 4j]), "n": torch.tensor([-1.0, 2.0]), "i": torch.tensor([5.0])}
    lazy = {"c": plain["c"].conj().clone().conj(), "n": torch._neg_view(-plain["n"]), "i": torch.tensor([1 - 5j]).conj().imag}
    assert lazy["c"].is_conj()
    assert lazy["n"].is_neg()
    checkpoint.save_async(tmp_path, lazy, 1).wait(30)
    checkpoint.save(tmp_path, lazy, 2)
    for step in (1, 2):
        target = {key: torch.zeros_like(value) for key, value in plain.items()}
        if lazily:
            target = {
                "c": target["c"].conj(),
                "n": torch._neg_view(target["n"]),
                "i": torch.zeros(1, dtype=torch.complex64).conj().imag,
            }
        checkpoint.load(tmp_path, target, step=step)
        assert all(torch.equal(target[key], plain[key]) for key in plain)


@pytest.mark.parametrize("dtype", sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str), ids=str)
def test_b_every_dtype_comes_back_bit_for_bit_or_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.arange(1, 17, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    try:
        tensor = raw.view(dtype)
    except RuntimeError:  # quantized dtypes are made another way
        tensor = torch._empty_affine_quantized([8], scale=1.0, zero_point=0, dtype=dtype)
    state = {"inside": (tensor,), "named": tensor}
    if re.fullmatch(r"torch\.(u?int[1-7]|bits.*|qu?int.*)", str(tensor.dtype)):
        with pytest.raises(UnsavableStateError) as caught:
            checkpoint.save(tmp_path, state, 1)
        assert [re.split(r"[ \[]", problem)[0] for problem in caught.value.problems] == ["inside", "named"]
        assert not list(tmp_path.iterdir())
        return
    checkpoint.save(tmp_path, state, 1)
    target = {"inside": (), "named": torch.zeros(16, dtype=torch.uint8)[: tensor.nbytes].view(tensor.dtype)}
    checkpoint.load(tmp_path, target)
    assert same(target["inside"][0], tensor)
    assert same(target["named"], tensor)


# -- what is refused -----------------------------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


class Text(str):
    __slots__ = ()


class Subclass(torch.Tensor):
    pass


def itself() -> list[Any]:
    value: list[Any] = [1]
    value.append(value)
    return value


def itself_with_a_tensor() -> list[Any]:
    value: list[Any] = [torch.ones(1)]
    value.append(value)
    return value


def with_an_attribute() -> OrderedDict[str, int]:
    value = OrderedDict(a=1)
    value.note = "lost"  # type: ignore[attr-defined]
    return value


REFUSED = {
    "a path": (pathlib.Path("x"), "save str(path)"),
    "a namespace": (argparse.Namespace(a=1), "save vars(namespace)"),
    "a simple namespace": (types.SimpleNamespace(a=1), "save vars(namespace)"),
    "a date": (dt.datetime(2030, 1, 1), "save date.isoformat()"),
    "a time span": (dt.timedelta(1), "save delta.total_seconds()"),
    "a deque": (collections.deque([1]), "save list(deque)"),
    "a defaultdict": (collections.defaultdict(int, a=1), "save dict(value)"),
    "a namedtuple": (Point(1), "save tuple(value)"),
    "an Enum": (Colour.RED, "save member.value"),
    "a kind of text": (Text("a"), "save str(value)"),
    "torch's version": (torch.__version__, "save str(value)"),
    "a range": (range(3), "save list(range)"),
    "a slice": (slice(3), "save (slice.start"),
    "a file in memory": (io.BytesIO(b"a"), "save buffer.getvalue()"),
    "a decimal": (decimal.Decimal(1), "save plain data"),
    "a function": (len, "save plain data"),
    "an array of text": (np.array(["a"]), "of dtype <U1"),
    "an array of objects": (np.array([None]), "of dtype object"),
    "an array of dates": (np.zeros(1, "M8[s]"), "save array.tolist()"),
    "an array of records": (np.zeros(1, "i4,f4"), "save array.tolist()"),
    "a long double": (np.zeros(1, np.longdouble), "save array.tolist()"),
    "a matrix": (np.matrix([[1]]), "np.asarray"),
    "numpy's text": (np.str_("a"), "save str(value)"),
    "numpy's long long": (np.longlong(1), "save value.item()"),
    "a generator": (torch.Generator(), "get_state()"),
    "a layout": (torch.strided, "save plain data"),
    "a parameter in an object": (nn.Parameter(torch.ones(1)), "save tensor.detach()"),
    "a subclass of tensors in an object": (torch.ones(1).as_subclass(Subclass), "save tensor.detach()"),
    "a sparse tensor": (torch.eye(2).to_sparse(), "to_dense()"),
    "a quantized tensor": (torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "int_repr()"),
    "a jagged tensor": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "the plain tensors"),
    "a tensor on meta": (torch.ones(2, device="meta"), "no data yet"),
    "what contains itself": (itself(), "or contains itself"),
    "what contains itself and a tensor": (itself_with_a_tensor(), "or contains itself"),
    "nesting too deep": ([[NESTED]], f"deeper than {MAX_DEPTH} levels"),
    "an OrderedDict with an attribute": (with_an_attribute(), "attribute 'note'"),
    "a module in a list": ([nn.Linear(1, 1)], "a key of its own"),
    "a scheduler in a tuple": ((Holder({}),), "a key of its own"),
    "a PerRank in a list": ([PerRank(1)], "value of a key"),
    "a path as a key": ({pathlib.Path("x"): 1}, "save str(path)"),
    "a scalar as a key": ({np.int64(1): 1}, "save value.item()"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_b_what_would_not_come_back_is_refused_by_name_with_the_way_out_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    value, way_out = REFUSED[name]
    store = tmp_path / "store"
    for state in ({"args": Holder({"a": value})}, {"args": {"a": PerRank([(value,)])}}, {"args": {"a": Holder([[value]])}}):
        for save in (checkpoint.save, checkpoint.save_async):
            with pytest.raises(UnsavableStateError) as caught:
                save(store, {"w": torch.ones(1), **state}, 1)
            assert way_out in str(caught.value)
            assert all(problem.startswith("args.a") for problem in caught.value.problems)
            assert "the state cannot be saved" in str(caught.value)
    assert not store.exists()


def test_b_all_that_is_refused_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnsavableStateError) as caught:
        checkpoint.save(tmp_path, {"a": pathlib.Path("x"), "b": {"c": [{"d": (1, {"e": range(1)})}]}, "f": 1}, 1)
    assert [problem.split(" ")[0] for problem in caught.value.problems] == ["a", "b.c.0.d[1]['e']"]


def test_b_k_the_last_loadable_step_stays_when_a_save_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": torch.ones(2, 2)}, 1, keep=1)
    with pytest.raises(UnsavableStateError, match=r"out_dir is of type pathlib.PosixPath, .* save str\(path\)"):
        checkpoint.save(tmp_path, {"w": torch.zeros(2, 2), "out_dir": pathlib.Path("x")}, 2, keep=1)
    state = {"w": torch.zeros(2, 2)}
    assert checkpoint.load(tmp_path, state).step == 1
    assert state["w"].all()


@pytest.mark.parametrize("damage", ["refused", "different"])
def test_b_k_a_value_that_does_not_read_back_is_not_published_and_the_last_step_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    checkpoint.save(tmp_path, {"n": 1}, 1, keep=1)
    original = torch.save

    def save(value: Any, file: Any) -> None:
        original(value if isinstance(value, torch.Tensor) else {"refused": pathlib.Path("x"), "different": 3}[damage], file)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        with pytest.raises(CheckpointWriteError, match="what was just written does not read back"):
            checkpoint.save(tmp_path, {"n": 2}, 2, keep=1)
    state = {"n": 0}
    assert checkpoint.load(tmp_path, state).step == 1
    assert state["n"] == 1
    assert manifest.complete_steps(tmp_path) == [1]


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": 1}, "a.b": 2},
        {"a": {1: 1, "1": 2}},
        {"a": [torch.ones(1)], "a.0": 2},
        {"m": nn.Linear(1, 1), "m.bias": 2},
        {"h": Holder({"a": 1}), "h.a": 2},
        {"h": Holder({"a": OrderedDict(b=torch.ones(1))}), "h.<OrderedDict>": 2},
    ],
)
def test_b_names_that_flatten_to_one_are_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(FQNMismatchError, match="comes from two places"):
        checkpoint.save(tmp_path / "store", state, 1)
    assert not (tmp_path / "store").exists()


def test_b_names_with_dots_next_to_an_object_or_a_per_rank_value_stay_apart(tmp_path: Path) -> None:
    state = {"ema": Holder({"a": 1}), "ema.decay": 0.5, "rng": PerRank({"a": 1}), "rng.rank_x": 7, "": 3, "my key": {"": 4}}
    checkpoint.save(tmp_path, state, 1)
    target = {"ema": Holder({}), "ema.decay": 0.0, "rng": PerRank({"a": 0}), "rng.rank_x": 0, "": 0, "my key": {"": 0}}
    checkpoint.load(tmp_path, target)
    assert target.pop("ema").state == {"a": 1}  # type: ignore[attr-defined]
    assert target.pop("rng").value == {"a": 1}  # type: ignore[attr-defined]
    assert target == {"ema.decay": 0.5, "rng.rank_x": 7, "": 3, "my key": {"": 4}}
    del target["rng.rank_x"]
    with pytest.raises(FQNMismatchError, match=r"unexpected in the checkpoint: rng\.rank_x"):
        checkpoint.load(tmp_path, {**target, "ema": Holder({}), "rng": PerRank({"a": 0})})


def test_b_a_name_with_a_lone_surrogate_and_a_state_that_is_no_dict_are_refused(tmp_path: Path) -> None:
    for state in ({"a\ud800": 1}, {"a": {"\udfff": 1}}, Counter(a=1), [1], {("a",): 1}, {True: 1}):
        with pytest.raises(UnsavableStateError):
            checkpoint.save(tmp_path / "store", state, 1)  # type: ignore[arg-type]
    assert not (tmp_path / "store").exists()


def test_b_the_callers_dicts_stay_what_they_are_and_int_keys_are_found(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"a": OrderedDict([(3, 1), (-1, torch.ones(1))]), "b": {"x": {}}}, 1)
    inner = OrderedDict([(-1, torch.zeros(1)), (3, 0)])
    target = {"a": inner, "b": {"x": 5}}
    checkpoint.load(tmp_path, target)
    assert target["a"] is inner
    assert list(inner) == [-1, 3]
    assert inner[3] == 1
    assert inner[-1].item() == 1.0
    assert target["b"] == {"x": {}}


# -- modules, optimizers, schedulers ------------------------------------------------------------------------------------

OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_b_every_optimizer_of_torch_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2, bias=False)
        return {"model": model, "optimizer": OPTIMIZERS[name](model.parameters(), lr=0.01)}

    def train(state: dict[str, Any]) -> list[float]:
        def loss() -> torch.Tensor:
            state["optimizer"].zero_grad()
            value = (state["model"](torch.eye(3)) - 1).square().sum()
            value.backward()
            return value

        return [float(state["optimizer"].step(loss)) for _ in range(3)]

    first, second = made(0), made(1)
    train(first)
    checkpoint.save(tmp_path, first, 1)
    checkpoint.load(tmp_path, second)
    assert train(second) == train(first)


def schedulers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    lr = torch.optim.lr_scheduler
    return {
        "StepLR": lr.StepLR(optimizer, 2),
        "MultiStepLR": lr.MultiStepLR(optimizer, [1, 2, 2, 5]),
        "LambdaLR": lr.LambdaLR(optimizer, lambda step: 0.5**step),
        "OneCycleLR": lr.OneCycleLR(optimizer, 0.1, 10),
        "CyclicLR": lr.CyclicLR(optimizer, 0.1, 0.2),
        "CosineAnnealingWarmRestarts": lr.CosineAnnealingWarmRestarts(optimizer, 3),
        "SequentialLR": lr.SequentialLR(optimizer, [lr.MultiStepLR(optimizer, [2]), lr.ExponentialLR(optimizer, 0.5)], [4]),
        "ReduceLROnPlateau": lr.ReduceLROnPlateau(optimizer),
        "disabled GradScaler": torch.amp.GradScaler("cpu", enabled=False),
        "GradScaler": torch.amp.GradScaler("cpu"),
    }


def test_b_schedulers_and_scalers_come_back_with_the_same_state(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(1))
    state: dict[str, Any] = schedulers(torch.optim.SGD([parameter], lr=0.1, momentum=0.9))
    before = {name: copy.deepcopy(item.state_dict()) for name, item in state.items()}
    checkpoint.save(tmp_path, state, 1)
    other: dict[str, Any] = schedulers(torch.optim.SGD([parameter], lr=0.3, momentum=0.9))
    for item in other.values():
        if isinstance(item, torch.optim.lr_scheduler.MultiStepLR):
            item.milestones = Counter()
    checkpoint.load(tmp_path, other)
    assert all(same(item.state_dict(), before[name]) for name, item in other.items())


class Extra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra", [b"", {"a": {1: Counter(b=2)}}, OrderedDict(a=torch.ones(1)), torch.arange(5, dtype=torch.uint8), [torch.ones(1)]]
)
def test_b_extra_state_of_a_module_comes_back_whatever_it_is(tmp_path: Path, extra: Any) -> None:
    checkpoint.save(tmp_path, {"m": nn.Sequential(Extra(extra))}, 1)
    for fresh in (None, torch.empty(0)):
        model = nn.Sequential(Extra(fresh))
        checkpoint.load(tmp_path, {"m": model})
        assert same(model[0].extra, extra)


def test_b_what_no_load_would_hand_back_to_a_module_is_refused(tmp_path: Path) -> None:
    class Noted(nn.Linear):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            return {**super().state_dict(*args, **options), "version": 3}

    class Copied(nn.Linear):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            return {name: value.clone() for name, value in super().state_dict(*args, **options).items()}

    with pytest.raises(UnsavableStateError, match=r"m\.version is of type int, which a load can restore only if get_extra"):
        checkpoint.save(tmp_path / "store", {"m": Noted(1, 1)}, 1)
    with pytest.raises(UnsavableStateError, match=r"m\.(weight|bias) is not a parameter or buffer of the module but a copy"):
        checkpoint.save(tmp_path / "store", {"m": nn.Sequential(nn.Linear(1, 1), Copied(1, 1))[1]}, 1)
    checkpoint.save(tmp_path / "other", {"m": nn.Linear(1, 1)}, 1)
    with pytest.raises(CheckpointMismatchError, match=r"does not fit:\n  - m\.(weight|bias) is not a parameter"):
        checkpoint.load(tmp_path / "other", {"m": Copied(1, 1)})
    with pytest.raises(UnsavableStateError, match=r"m\._extra_state is of type _io\.BytesIO"):
        checkpoint.save(tmp_path / "store", {"m": Extra(io.BytesIO())}, 1)
    assert not (tmp_path / "store").exists()


def test_b_parameters_and_subclasses_under_names_are_filled_and_stay_what_they_are(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"p": nn.Parameter(torch.ones(2)), "s": torch.ones(2).as_subclass(Subclass)}, 1)
    target = {"p": nn.Parameter(torch.zeros(2)), "s": torch.zeros(2).as_subclass(Subclass)}
    parameter = target["p"]
    checkpoint.load(tmp_path, target)
    assert target["p"] is parameter
    assert parameter.requires_grad
    assert parameter.tolist() == [1.0, 1.0]
    assert type(target["s"]) is Subclass
    assert target["s"].tolist() == [1.0, 1.0]


def test_b_a_load_still_says_what_it_cannot_fill(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"a": torch.ones(2)}, 1)
    with pytest.raises(CheckpointMismatchError, match="does not fit:\n  - a is a meta tensor"):
        checkpoint.load(tmp_path, {"a": torch.ones(2, device="meta")})


def test_b_a_counter_and_a_dict_with_int_keys_in_another_file_come_back_as_they_are(tmp_path: Path) -> None:
    torch.save({"held": {"milestones": Counter({5: 1, 9: 2})}}, tmp_path / "counter.pt")
    state = {"held": Holder(None)}
    checkpoint.load(tmp_path / "counter.pt", state)
    assert same(state["held"].state, {"milestones": Counter({5: 1, 9: 2})})
    torch.save({"held": {"best": {5: 1, 9: 2}}}, tmp_path / "dict.pt")
    checkpoint.load(tmp_path / "dict.pt", state)
    assert same(state["held"].state, {"best": {5: 1, 9: 2}})


# -- any value --------------------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(width=64),
    st.complex_numbers(),
    st.text(st.characters(), max_size=4),
    st.binary(max_size=4),
    st.sampled_from([torch.float32, torch.bool, torch.device("cpu"), torch.device("cuda:1"), "\ud800", 1 << 200, -(1 << 63)]),
)
KEYS = st.one_of(SCALARS, st.tuples(SCALARS, SCALARS), st.frozensets(SCALARS, max_size=2))
ARRAYS = st.builds(
    lambda dtype, shape, order: (
        np.frombuffer(np.random.bytes(64), dtype=dtype)[: int(np.prod(shape))].reshape(shape, order=order).copy(order)
    ),
    st.sampled_from(["i1", "<u2", ">i4", "f2", ">f8", "c8"]),
    st.sampled_from([(), (0,), (3,), (2, 0), (2, 2), (2, 1, 2)]),
    st.sampled_from("CF"),
)
LEAVES = st.one_of(
    SCALARS,
    ARRAYS,
    ARRAYS.map(lambda found: found.reshape(-1)[0] if found.size else np.float32(1)),
    st.binary(max_size=3).map(bytearray),
    st.lists(st.integers(0, 3), max_size=3).map(torch.Size),
    st.sets(KEYS, max_size=3),
    st.frozensets(KEYS, max_size=3),
    st.sampled_from([torch.ones(2), torch.zeros(0, 3), torch.tensor([1j]).conj(), torch.tensor(1.0), torch.arange(4)[::2]]),
)
STRANGERS = st.sampled_from(
    [pathlib.PurePosixPath("a"), range(2), collections.deque(), Text("a"), Point(1), np.array(["a"]), nn.Parameter(torch.ones(1))]
)


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(KEYS, inner, max_size=3),
            st.dictionaries(st.text(max_size=3), inner, max_size=3),
            st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
            st.dictionaries(KEYS, inner, max_size=3).map(Counter),
            inner.map(lambda item: [item, item]),
        ),
        max_leaves=8,
    )


@given(value=nested(st.one_of(LEAVES, LEAVES, LEAVES, LEAVES, STRANGERS)))
@example(value={"\ud800": None})
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_b_any_value_comes_back_or_is_refused_by_name_with_nothing_on_disk(
    tmp_path_factory: pytest.TempPathFactory, value: Any
) -> None:
    store = tmp_path_factory.mktemp("any") / "store"
    refusal: CheckpointMismatchError | None = None
    try:
        checkpoint.save(store, {"held": Holder(value), "mine": PerRank(value)}, 1)
    except (UnsavableStateError, FQNMismatchError) as error:
        refusal = error
    if refusal is not None:
        assert all("held" in problem or "mine" in problem for problem in refusal.problems)
        assert not store.exists()
        return
    state = {"held": Holder(None), "mine": PerRank(blank(value))}
    checkpoint.load(store, state)
    assert same(state["held"].state, value)  # type: ignore[attr-defined]
    assert same(state["mine"].value, value)  # type: ignore[attr-defined]


# -- whether ranks agree ----------------------------------------------------------------------------------------------------


@given(value=nested(LEAVES), other=nested(LEAVES))
@settings(max_examples=300, deadline=None)
def test_b_two_digests_are_equal_when_the_values_are_the_same_and_only_then(value: Any, other: Any) -> None:
    assert (digest(snapshot(value)) == digest(snapshot(other))) == same(value, other)
    assert digest(snapshot(value)) == digest(snapshot(copy.deepcopy(value)))


LONG = np.arange(100_000.0)
CHANGED = LONG.copy()
CHANGED[50_000] = np.nextafter(CHANGED[50_000], np.inf)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (0.0, -0.0),
        (True, 1),
        (1, 1.0),
        (float("nan"), SNAN),
        (1, np.int64(1)),
        (np.int32(1), np.int64(1)),
        (np.zeros(1), -np.zeros(1)),
        (np.zeros(2, "<i4"), np.zeros(2, ">i4")),
        (np.zeros((2, 1)), np.zeros((1, 2))),
        (LONG, CHANGED),
        (LONG.tolist(), CHANGED.tolist()),
        (list(range(100)), [*range(99), 99.0]),
        ([1.0] * 40, [True] * 40),
        (list(range(40)), tuple(range(40))),
        ([0] * 39 + [2**70], [0] * 39 + [2**70 + 1]),
        ((torch.tensor(1.0),), (torch.tensor(1.0, dtype=torch.float64),)),
        ((torch.tensor([0.0]),), (torch.tensor([-0.0]),)),
        ([torch.Size([1])], [(1,)]),
        ({"a": 1}, OrderedDict(a=1)),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        ([["a"], "b"], ["a", ["b"]]),
        (["ab", "c"], ["a", "bc"]),
        ({1: 2}, Counter({1: 2})),
        (b"a", bytearray(b"a")),
        ({1}, frozenset({1})),
    ],
)
def test_b_what_differs_in_a_type_or_a_bit_has_another_digest(value: Any, other: Any) -> None:
    assert digest(snapshot(value)) != digest(snapshot(other))


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({3, 1, 2}, {1, 2, 3}),
        ([SHARED, SHARED], [[1.5], [1.5]]),
        (np.asfortranarray(LARGE), LARGE),
        ((torch.arange(4)[::2],), (torch.tensor([0, 2]),)),
        ((torch.tensor([1 - 1j]),), (torch.tensor([1 + 1j]).conj(),)),
    ],
)
def test_b_what_is_equal_and_lies_otherwise_in_memory_has_the_same_digest(value: Any, other: Any) -> None:
    assert digest(snapshot(value)) == digest(snapshot(other))


def test_b_lists_that_share_are_checked_and_compared_once_each() -> None:
    value: Any = [1]
    for _ in range(MAX_DEPTH - 2):
        value = [value, value]
    assert digest(snapshot({"a": value})) == digest(snapshot({"a": copy.deepcopy(value)}))
