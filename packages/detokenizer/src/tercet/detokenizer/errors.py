"""Errors of the detokenizer.

DetokenizerError
├── ConfigError         an invalid option
├── TokenizerError      the scheduler's tokenizer.json cannot be read
├── SpecError           a request's DecodeSpec is damaged, beyond the limits, or names a tokenizer that is not here
└── MalformedBatchError the columns of a batch do not fit together
"""


class DetokenizerError(Exception):
    """Base class of the detokenizer's errors."""


class ConfigError(DetokenizerError, ValueError):
    """Invalid option. Ends the process with one line."""


class TokenizerError(DetokenizerError):
    """Unreadable tokenizer.json. The process continues without it and logs the error."""


class SpecError(DetokenizerError):
    """DecodeSpec that cannot be followed. Ends that one choice with its message."""


class MalformedBatchError(DetokenizerError):
    """Batch whose columns do not fit together. Counted and dropped as a whole."""
