"""A part that loses one message in a hundred of those it sends, whatever they say, and does not notice.

Usage: python tests/chaos/lossy_part.py MODULE OPTIONS
"""

import random
import runpy
import sys
from collections.abc import Sequence

from tercet.protocol import sockets
from tercet.protocol.messages.codec import Frame
from tercet.protocol.transport.channel import Outbox

LOST = 0.01


class LossyOutbox(Outbox):
    """Says that it sent what it did not."""

    def send(self, frames: Sequence[Frame]) -> bool:
        return random.random() < LOST or super().send(frames)


if __name__ == "__main__":
    vars(sockets)["Outbox"] = LossyOutbox
    _, module, *sys.argv[1:] = sys.argv
    runpy.run_module(module, run_name="__main__", alter_sys=True)
