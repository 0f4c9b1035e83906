"""The table of rename rules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from labkit.checkpoint.errors import CheckpointError


@dataclass(frozen=True)
class Rule:
    """A line of a rename table: a pattern with ``*`` and what becomes of a name that it matches as a whole.

    Each ``*`` in the replacement stands for what the ``*`` in its place matched. An empty replacement drops the entry.
    """

    pattern: str
    replacement: str

    def apply(self, name: str) -> str | None:
        """The new name, or None when the pattern does not match."""
        expression = "(.*)".join(re.escape(part) for part in self.pattern.split("*"))
        match = re.fullmatch(expression, name)
        if match is None:
            return None
        parts = iter(match.groups())
        return re.sub(r"\*", lambda _: next(parts, ""), self.replacement)


def read_rules(path: Path) -> list[Rule]:
    """Read a rename table: one ``old -> new`` a line, ``#`` begins a comment, the first match wins.

    Raises:
        CheckpointError: The file or a line cannot be read, or its replacement has more ``*`` than its pattern.
    """
    rules = []
    try:
        text_lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: the rename table cannot be read ({error})") from None
    for number, line in enumerate(text_lines, start=1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        pattern, arrow, replacement = (part.strip() for part in text.partition("->"))
        if not arrow or not pattern or replacement.count("*") > pattern.count("*"):
            raise CheckpointError(f"{path}, line {number}: {text!r} is no rule. Write 'old.*.weight -> new.*.weight'.")
        rules.append(Rule(pattern, replacement))
    return rules
