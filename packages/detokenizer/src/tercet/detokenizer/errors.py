"""What can go wrong in the detokenizer.

DetokenizerError
├── ConfigError         an option that cannot be meant
├── TokenizerError      the scheduler's tokenizer.json cannot be read
├── SpecError           a request's DecodeSpec is damaged, beyond the limits, or names a tokenizer that is not here
└── MalformedBatchError the columns of a batch do not fit together
"""


class DetokenizerError(Exception):
    """The root of the tree."""


class ConfigError(DetokenizerError, ValueError):
    """An option that cannot be meant. Ends the process with one line."""


class TokenizerError(DetokenizerError):
    """A tokenizer.json that cannot be read. The part goes on without it and says so."""


class SpecError(DetokenizerError):
    """A DecodeSpec that cannot be followed. Ends that one choice with its message."""


class MalformedBatchError(DetokenizerError):
    """A batch whose columns do not fit together. Counted and dropped whole."""
