"""What can be wrong with the journal.

JournalUnavailable   a write did not become durable: the volume is full or failing; it may work again later
JournalUnusable      the database cannot be opened or read at all; somebody has to look at it
└── JournalInUse     another process has it
"""

from __future__ import annotations


class JournalUnavailable(Exception):
    """The volume that holds the journal is full or failing; the message is for people."""


class JournalUnusable(Exception):
    """The journal cannot serve; the message names the file and says what to do."""


class JournalInUse(JournalUnusable):
    """Another journal is open on the database."""
