"""The error tree. A child exists where a caller does something different about it.

FarsparkError
├── ConfigError       a person must act: a setting, an address, a device, a file
│   └── CheckpointError   the checkpoint is not one that can be served; the message names the key or the tensor
├── TransportError    the connection is gone; connect again
├── ProtocolError     the peer breaks the protocol; close the connection
└── Refused           the peer understood and said no; `status` says why

A missed deadline is the built-in TimeoutError.
"""

from __future__ import annotations


class FarsparkError(Exception):
    """Root of everything that Farspark raises on purpose."""


class ConfigError(FarsparkError):
    """Something that only a person can put right. The message names the variable, the value and the remedy."""


class CheckpointError(ConfigError):
    """A drafter checkpoint that cannot be served; the message names the file, the key or the tensor."""


class TransportError(FarsparkError):
    """The connection does not exist any more, or never did."""


class ProtocolError(FarsparkError):
    """The peer sent bytes that no well-behaved peer sends."""


class Refused(FarsparkError):
    """The peer answered with a frame status other than OK.

    `status` is the wire's FrameStatus as an int; kept as a number so that this module imports nothing.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
