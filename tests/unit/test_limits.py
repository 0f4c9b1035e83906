"""The record of time limits."""

from __future__ import annotations

import pytest

from labkit.base.limits import LIMITS, Limits, other_limits


def _fail_inside() -> None:
    with other_limits(kill_after_s=0.5):
        assert Limits(kill_after_s=0.5) == LIMITS
        with other_limits(kill_after_s=0.25, end_s=1.0):
            assert (LIMITS.kill_after_s, LIMITS.end_s) == (0.25, 1.0)
        assert Limits(kill_after_s=0.5) == LIMITS
        raise ZeroDivisionError


def test_other_limits_hold_inside_the_block_and_end_with_it_also_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError):
        _fail_inside()
    assert Limits() == LIMITS


def test_a_limit_that_does_not_exist_is_refused() -> None:
    with pytest.raises(AttributeError, match="no_such_s"), other_limits(no_such_s=1.0):
        pass
