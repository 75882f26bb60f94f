"""The inboxes of schedulers and frontends with the messages that not every one decodes."""

from tercet.protocol.messages.encodings import EncodedMedia, EncodeMediaReq
from tercet.protocol.messages.messages import FrontendInbox, SchedulerInbox
from tercet.protocol.messages.profiles import ProfileReq
from tercet.protocol.messages.weight_transfers import WeightTransferReq

FullSchedulerInbox = SchedulerInbox | WeightTransferReq | ProfileReq | EncodeMediaReq
FullFrontendInbox = FrontendInbox | EncodedMedia
