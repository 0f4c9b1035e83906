"""Limits of time after which labkit takes its next step: one record of seconds.

Code that waits reads its limit from :data:`LIMITS` each time. Each process has its own: a change in the notebook's reaches no rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Limits:
    """Limits of time, all in seconds.

    Attributes:
        first_look_s: A run that lasts this long is looked at. Two successive looks that find the same hang report it.
        look_every_s: The time from one look to the next.
        early_look_s: The earlier look, with which a last look is compared, gets this long for its answers.
        answer_s: The answers to a look come within this. A control thread answers within milliseconds unless native code holds
            Python's lock.
        grace_s: The other ranks may go on for this long after one has failed: they may be about to fail with the same error.
        death_grace_s: The same after a death, which no other rank repeats.
        cause_s: A rank that was cut off often reports this before the system reports the death that caused it.
        abort_after_s: SIGINT ends Python code within milliseconds; a rank that has not ended by then is in native code. Ranks
            that report that they wait in a collective are freed at once.
        kill_after_s: Aborting NCCL took 0.5 s on 2 H200; freeing gloo takes milliseconds. A rank that has not ended by then is
            stuck elsewhere.
        hurried_kill_after_s: A second interrupt shortens the wait. But a user who holds Ctrl-C down does not want to kill ranks
            that the abort is about to free.
        resend_s: An interrupt or abort that had no effect is sent again after this.
        end_s: A rank that is asked to end may take this long, and a process that is killed may too.
        last_messages_s: The report of a death may wait this long for messages that the dead rank had sent, while other ranks
            keep the socket busy.
        agents_end_s: The agents of a pool that is closed may take this long to end.
        connect_s: A rank tries for this long to reach the store in which the ranks meet.
        notebook_interrupt_s: A notebook whose time is up is interrupted, and its kernel may end its cell within this.
        notebook_write_s: The process that reads a killed notebook may then write for this long. The two together keep a notebook
            from taking 5 s more than its time.
        notebook_leftovers_s: The ranks of a pool end by themselves when their kernel has gone, within this.
        notebook_kill_s: Killing processes takes longer only where the system does not let one go.
    """

    first_look_s: float = 2.0
    look_every_s: float = 1.0
    early_look_s: float = 0.2
    answer_s: float = 0.5
    grace_s: float = 1.0
    death_grace_s: float = 0.1
    cause_s: float = 2.0
    abort_after_s: float = 0.4
    kill_after_s: float = 6.0
    hurried_kill_after_s: float = 2.0
    resend_s: float = 0.25
    end_s: float = 2.0
    last_messages_s: float = 0.2
    agents_end_s: float = 8.0
    connect_s: float = 20.0
    notebook_interrupt_s: float = 2.5
    notebook_write_s: float = 2.0
    notebook_leftovers_s: float = 3.0
    notebook_kill_s: float = 2.0


LIMITS = Limits()


@contextmanager
def other_limits(**seconds: float) -> Iterator[None]:
    """Let labkit wait for other times inside the block. Tests use this.

    Args:
        **seconds: Attributes of :class:`Limits` and their values.
    """
    before = {name: getattr(LIMITS, name) for name in seconds}
    vars(LIMITS).update(dataclasses.asdict(dataclasses.replace(LIMITS, **seconds)))
    try:
        yield
    finally:
        vars(LIMITS).update(before)
