"""Import torch's test bodies where this module is imported: once in a fork server, whose children then have them."""

from __future__ import annotations

from tests.process.upstream import upstream

upstream()
