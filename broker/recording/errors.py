"""The errors of recording files.

BrokerError
└── RecordingError
    ├── NotARecordingError      another kind of file, or one that ends before its header
    ├── NewerRecordingError     written by a later format than this version reads
    ├── WrongRunError           appending one run's messages to another run's file
    ├── OtherLogError           appending a log's messages to the file of another log of the same run id
    └── RecordingInUseError     another process writes the file
"""

from __future__ import annotations

from broker.errors import BrokerError


class RecordingError(BrokerError):
    """Root of the errors of recording files."""


class NotARecordingError(RecordingError):
    """The file does not begin like a recording."""


class NewerRecordingError(RecordingError):
    """The file's format is newer than this version of the program."""


class WrongRunError(RecordingError):
    """The file holds another run, or was made by other redaction rules."""


class OtherLogError(RecordingError):
    """The file was recorded from another log of the same run id."""


class RecordingInUseError(RecordingError):
    """Another process writes the file."""
