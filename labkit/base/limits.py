"""Time limits, in seconds, after which labkit takes its next step.

Code that waits reads its limit from :data:`LIMITS` each time. Each process has its own: changing the notebook's affects no rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Limits:
    """Time limits, all in seconds.

    Attributes:
        first_look_s: A run that lasts this long is examined. A hang is reported once two successive looks find it.
        look_every_s: The time from one look to the next.
        early_look_s: The look before the last one, which the last is compared with, waits this long for answers.
        answer_s: A look waits this long for answers. A control thread answers within milliseconds unless native code holds
            Python's lock.
        grace_s: The other ranks may go on for this long after one has failed: they may be about to fail with the same error.
        death_grace_s: The same after a death, which no other rank repeats.
        cause_s: A rank that lost its connection often reports that before the system reports the death that caused it. Wait this
            long for the death.
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
        notebook_interrupt_s: The kernel of a notebook that ran out of time is interrupted and has this long to end its cell.
        notebook_write_s: After the kernel was killed, the process that reads the notebook has this long to write. The two together
            keep a notebook from overrunning by 5 s.
        notebook_leftovers_s: When their kernel has gone, the ranks of a pool end by themselves within this time.
        notebook_kill_s: Killing processes takes longer only if the system does not release one.
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
    """Use other limits inside the block. Tests do.

    Args:
        **seconds: Attributes of :class:`Limits` and their values.
    """
    before = {name: getattr(LIMITS, name) for name in seconds}
    vars(LIMITS).update(dataclasses.asdict(dataclasses.replace(LIMITS, **seconds)))
    try:
        yield
    finally:
        vars(LIMITS).update(before)
