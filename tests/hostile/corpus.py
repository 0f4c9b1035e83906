"""All hostile files, in one order."""

from __future__ import annotations

from tests.hostile import archives, folders, indices, pickles
from tests.hostile.attacks import ATTACKS, Hostile

MODULES = (pickles, archives, indices, folders)  # importing them registers their attacks
PENDING: dict[str, str] = {
    **{f"pickle_that_calls-{number}": "a dotted name below a module of torch is taken for data" for number in (7, 10, 13, 21, 22)},
    "pickle_that_grows-17": "2**400 leaves are counted one by one",
    **{f"tensor_of_another_size-{number}": "a tensor of 4 TiB over 64 bytes is written out" for number in (11, 12, 17, 18, 19)},
}
"""Those that labkit does not withstand yet, by name, with what happens."""
EVERY = [Hostile(kind, number) for kind, (count, _) in ATTACKS.items() for number in range(count)]
