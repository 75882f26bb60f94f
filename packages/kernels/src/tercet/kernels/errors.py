"""The errors of this package.

KernelsError
└── UnavailableBackendError
"""


class KernelsError(Exception):
    """Anything this package raises on purpose."""


class UnavailableBackendError(KernelsError):
    """A backend that does not exist or cannot run on this machine."""
