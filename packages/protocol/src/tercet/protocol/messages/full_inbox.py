"""The inbox of a scheduler with the messages that not every scheduler decodes."""

from tercet.protocol.messages.messages import SchedulerInbox
from tercet.protocol.messages.profiles import ProfileReq
from tercet.protocol.messages.weight_transfers import WeightTransferReq

FullSchedulerInbox = SchedulerInbox | WeightTransferReq | ProfileReq
