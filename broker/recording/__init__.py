"""Recording files: a run's messages and payloads in append-only, compressed, indexed, self-describing files.

    Recorder   follows a run into a file          RecordingWriter   appends blocks
    Recording  reads one, whole or by index       Redactor          takes out what must not leave the run

The format: frames.py (how bytes stand), blocks.py (what is inside), header.py, index.py.
"""

from broker.recording.errors import (
    NewerRecordingError,
    NotARecordingError,
    OtherLogError,
    RecordingError,
    RecordingInUseError,
    WrongRunError,
)
from broker.recording.header import Header, new_header
from broker.recording.reader import Gap, Recording, TopicSummary
from broker.recording.recorder import Recorder, RecorderFigures, RecorderSettings
from broker.recording.redaction import Redactor, Rule, parse_rule
from broker.recording.standing import check_log
from broker.recording.writer import RecordingWriter

__all__ = [
    "Gap",
    "Header",
    "NewerRecordingError",
    "NotARecordingError",
    "OtherLogError",
    "Recorder",
    "RecorderFigures",
    "RecorderSettings",
    "Recording",
    "RecordingError",
    "RecordingInUseError",
    "RecordingWriter",
    "Redactor",
    "Rule",
    "TopicSummary",
    "WrongRunError",
    "check_log",
    "new_header",
    "parse_rule",
]
