"""Recognition of files that a download left in place of the real ones, by their first bytes."""

HEAD = 512
"""Bytes from the start of a file that `download_fault` needs."""
_SHOWN = 80
_LFS = b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/", b"# xet version"
_PAGE = b"<!doctype html", b"<html", b"<?xml"
_GGUF = b"GGUF"
_FORMATS = {
    _GGUF: "a GGUF file",
    b"PK\x03\x04": "a zip archive, which PyTorch's pickled weights are, too",
    b"\x1f\x8b": "a gzip archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ\x00": "an xz archive",
    b"\x89HDF\r\n": "an HDF5 file",
    b"\x80\x02": "a Python pickle",
    b"PAR1": "a Parquet file",
}
"""Formats that people rename or download by mistake, by their magic bytes."""


def download_fault(head: bytes, size: int, suffix: str) -> str:
    """Return why a file is not the one that its name says, and what to do; empty if nothing is known against it.

    `head` holds its first `HEAD` bytes, `size` is its length.
    """
    if size == 0:
        return "" if suffix == ".jinja" else "is empty: download it again"
    if head.startswith(_LFS):
        return "is a pointer of git-lfs, not the file itself: run `git lfs pull` in its repository, or download it"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_PAGE):
        return "is a web page, saved in place of the file: download the file itself"
    for magic, kind in _FORMATS.items():
        if head.startswith(magic) and not (magic == _GGUF and suffix == ".gguf"):
            return f"is {kind}, whatever its name says"
    if suffix in (".safetensors", ".json") and (message := _message(head, size, suffix)):
        return f"holds a message instead of the file, {message!r}: download it again"
    return ""


def _message(head: bytes, size: int, suffix: str) -> str:
    """Return the error message of a server that was saved as the file; empty if the file is something else."""
    if size > HEAD or (suffix == ".json" and head.lstrip()[:1] in (b"{", b"[", b'"')):
        return ""
    try:
        text = head.decode().strip()
    except UnicodeDecodeError:
        return ""
    readable = all(each.isprintable() or each.isspace() for each in text)
    return " ".join(text.split())[:_SHOWN] if readable and (text[:1].isalpha() or text[:1] == "{") else ""
