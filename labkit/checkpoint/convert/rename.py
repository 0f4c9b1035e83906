"""The table of rename rules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from labkit.checkpoint.errors import CheckpointError
from labkit.checkpoint.wording import bytes_text

_MOST_BYTES = 1 << 26


@dataclass(frozen=True)
class Rule:
    """A line of a rename table: a pattern with ``*``, which must match a whole name, and the new name.

    Each ``*`` in the replacement becomes the text that the corresponding ``*`` matched. An empty replacement drops the entry.
    """

    pattern: str
    replacement: str

    def apply(self, name: str) -> str | None:
        """Return the new name, or None if the pattern does not match.

        If there are several ways to match, the first ``*`` takes as much as possible, then the second, and so on.
        """
        head, *texts = self.pattern.split("*")
        if not texts:
            return self.replacement if name == head else None
        # Place each literal as late as possible, from the last to the first; no backtracking is needed.
        taken: list[str] = []
        end = len(name)
        for index, text in enumerate(reversed(texts)):
            at = name.rfind(text, len(head), end)
            if at < 0 or (index == 0 and at + len(text) != end):
                return None
            taken.append(name[at + len(text) : end])
            end = at
        if not name.startswith(head):
            return None
        stars = [name[len(head) : end], *reversed(taken[1:])]
        first, *rest = self.replacement.split("*")
        return first + "".join(star + text for star, text in zip(stars, rest, strict=False))


def read_names(path: Path) -> list[str]:
    """Read the names of an optimizer's parameters, in its order, one per line.

    Raises:
        CheckpointError: The file cannot be read.
    """
    return _read(path, "order of parameters").split()


def read_rules(path: Path) -> list[Rule]:
    """Read a rename table: one ``old -> new`` per line; ``#`` begins a comment; the first match wins.

    Raises:
        CheckpointError: The file or a line cannot be read, or the replacement has more ``*`` than the pattern.
    """
    rules = []
    for number, line in enumerate(_read(path, "rename table").splitlines(), start=1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        pattern, arrow, replacement = (part.strip() for part in text.partition("->"))
        if not arrow or not pattern or replacement.count("*") > pattern.count("*"):
            raise CheckpointError(f"{path}, line {number}: {text!r} is not a rule. Write 'old.*.weight -> new.*.weight'.")
        rules.append(Rule(pattern, replacement))
    return rules


def _read(path: Path, what: str) -> str:
    # Pipes are allowed (the shell makes one for <(command)), but endless input is not.
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise CheckpointError(f"{path}: the {what} cannot be read (it has more than {bytes_text(_MOST_BYTES)})")
        return text.decode("utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: the {what} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: the {what} is not UTF-8 text (at byte {error.start})") from None
