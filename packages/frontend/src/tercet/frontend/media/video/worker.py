"""`python -m tercet.frontend.media.video.worker`: a killable process that decodes clients' clips.

Errors complete "the video is refused: ". The process ends when its input ends.
"""

import sys
import time
from collections.abc import Iterator

import av.logging
from PIL import Image

from tercet.frontend.helper.limits import detach, limit_memory, processor_time
from tercet.frontend.helper.pipe import encode_frame, read_frame
from tercet.frontend.media.image_sizes import AspectRatioError
from tercet.frontend.media.image_worker import RefusedError, file_of
from tercet.frontend.media.video.files import Clip, Stills, open_clip
from tercet.frontend.media.video.pipe import FrameGroup, ReadVideo, decode_order
from tercet.frontend.media.video.sampling import frame_indices, frame_size, group_times, groups_of

MEMORY = 1024 * 1024 * 1024
"""Bytes of address space beyond those the process has: a decoder holds up to 17 frames of the largest size."""


def main() -> None:
    """Process orders until the input ends."""
    detach()
    Image.init()
    Image.MAX_IMAGE_PIXELS = None  # sizes are checked, and raise no warnings
    av.logging.set_level(None)
    limit_memory(MEMORY)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    groups: Iterator[FrameGroup] = iter(())
    left = 0.0
    while (data := read_frame(source)) is not None:
        if isinstance(order := decode_order(data), ReadVideo):
            groups, left = clip_groups(order), order.seconds
        began = time.process_time()
        with processor_time(left):
            result = _next(groups)
        left = max(0.001, left - (time.process_time() - began))  # 0 would be no limit
        target.write(encode_frame(result))
        target.flush()


def _next(groups: Iterator[FrameGroup]) -> FrameGroup:
    try:
        return next(groups, FrameGroup())
    except (RefusedError, AspectRatioError) as error:
        return FrameGroup(error=str(error))
    except MemoryError:
        return FrameGroup(error="it takes too much memory to decode")
    except Exception as error:  # PyAV and Pillow raise many types for damaged files
        return FrameGroup(error=f"it is damaged ({type(error).__name__})")


def clip_groups(order: ReadVideo) -> Iterator[FrameGroup]:
    """Yield the groups of frames that a model takes. Raises an error for a file that is refused or damaged."""
    form = order.form
    clip = _clip(order)
    stills = isinstance(clip, Stills) and clip.frames <= form.sampling.max_frames
    indices = [*range(clip.frames)] if stills else frame_indices(clip.frames, clip.per_second, form)
    groups = groups_of(indices, form)
    times = group_times(len(groups), form.frames * clip.frames / (len(indices) * clip.per_second), form)
    images = clip.images([index for group in groups for index in group])
    size = None
    for group, at in zip(groups, times, strict=True):
        frames = [next(images) for _ in group]
        size = size or frame_size(frames[0].height, frames[0].width, len(indices), form)
        height, width = size
        resized = [each.resize((width, height), Image.Resampling(form.resample)) for each in frames]
        yield FrameGroup(
            array=b"".join(each.tobytes() for each in resized),
            height=height,
            width=width,
            seconds=(group[0] + group[-1]) / 2 / clip.per_second,
            time=at,
        )


def _clip(order: ReadVideo) -> Clip:
    if order.stills:
        return Stills([file_of(text) for text in order.base64.split(",")], order.form.sampling.per_second)
    return open_clip(order.file or file_of(order.base64))


if __name__ == "__main__":
    main()
