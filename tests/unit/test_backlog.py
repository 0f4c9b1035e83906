"""The messages of its ranks that an agent keeps while no notebook listens."""

from __future__ import annotations

import pickle
from typing import Any

from labkit.wire.messages import Output, Result, Stream
from labkit.wire.node_messages import FromRank
from labkit.worker.machine.backlog import LIMIT_BYTES, Backlog


def add(backlog: Backlog, message: Output | Result) -> None:
    backlog.add(FromRank(), pickle.dumps(message), output=message if isinstance(message, Output) else None)


def line(rank: int, text: str) -> Output:
    return Output(rank, 1, (Stream("stdout", text),))


def drain(backlog: Backlog) -> list[Any]:
    found = []
    while (parts := backlog.first()) is not None:
        assert isinstance(pickle.loads(parts[0]), FromRank)
        found.append(pickle.loads(parts[1]))
        backlog.taken()
    return found


def test_messages_come_in_order_and_the_size_is_counted() -> None:
    backlog = Backlog()
    messages = [line(0, "a"), Result(0, 1, None), line(1, "b")]
    for message in messages:
        add(backlog, message)
    assert len(backlog) == 3
    assert backlog.size_bytes > 0
    assert drain(backlog) == messages
    assert backlog.size_bytes == 0


def test_the_oldest_output_goes_first_and_is_counted_and_results_stay() -> None:
    backlog = Backlog()
    add(backlog, Result(1, 1, None))
    for number in range(100):
        add(backlog, line(number % 2, f"{number} " + "x" * 100_000))
        add(backlog, Result(0, 100 + number, None))
        backlog.forget_oldest_output()
        assert backlog.size_bytes < LIMIT_BYTES
    found = drain(backlog)
    told, rest = found[:2], found[2:]
    assert {message.rank for message in told} == {0, 1}
    assert all("are lost: no notebook listened" in message.items[0].text for message in told)
    results = [message for message in rest if isinstance(message, Result)]
    assert results == [Result(1, 1, None), *(Result(0, 100 + number, None) for number in range(100))]
    kept = [int(message.items[0].text.split()[0]) for message in rest if isinstance(message, Output)]
    assert kept == list(range(100 - len(kept), 100))
    lost = sum(int(message.items[0].text.split()[1].replace(",", "")) for message in told)
    assert lost > (100 - len(kept)) * 100_000
    assert drain(backlog) == []


def test_a_cleared_backlog_says_nothing_of_what_was_lost() -> None:
    backlog = Backlog()
    for _ in range(100):
        add(backlog, line(0, "x" * 100_000))
    backlog.forget_oldest_output()
    backlog.clear()
    assert drain(backlog) == []
    assert backlog.size_bytes == 0
