"""What holds for all tests of this package."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def only_our_words(caplog: pytest.LogCaptureFixture) -> None:
    """The SDK warns at every load in place, and at every fault that it gets over."""
    caplog.set_level(logging.CRITICAL, logger="tinker")
