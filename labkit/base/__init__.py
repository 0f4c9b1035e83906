"""What every room uses and none of them owns: names, limits, ranks, processes, folders. It knows no room."""

from __future__ import annotations
