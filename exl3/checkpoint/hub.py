# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The headers of a checkpoint on the hub, without its weights.

They are laid into a folder as sparse files of the right lengths, so that what reads a
checkpoint's folder reads them too, and there is one reader. huggingface_hub is needed
only for this, and so is imported late; HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are
its settings.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from exl3.checkpoint.file_header import MAX_HEADER_BYTES
from exl3.checkpoint.json_files import MAX_JSON_BYTES
from exl3.format.errors import FileError

_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96})(?:@(?P<revision>[\w./-]{1,200}))?",
    re.ASCII,
)
#: What is asked of a safetensors file at first; most headers are shorter.
_FIRST_BYTES = 128 * 1024
#: Of all files of a repository together; GLM-5.2 in four slices has 0.3 GB.
MAX_TOTAL_BYTES = 2_000_000_000
MAX_FILES = 10_000
#: JSON files that say nothing of the weights, by the beginnings of their names.
_OTHER_JSON = ("tokenizer", "vocab", "added_tokens", "special_tokens")
_CONNECTIONS = 8
_TIMEOUT = 30  # seconds without a byte
_RETRIES = 2


@contextmanager
def checkpoint_folder(path: str) -> Iterator[Path]:
    """A folder with a checkpoint's headers: its own, or one made from the hub's.

    Args:
        path: A folder, or an id on the hub: `org/name` or `org/name@revision`.

    Raises:
        FileError: There is no such folder or repository, or it cannot be reached.
    """
    folder = Path(path)
    if path and _exists(folder):
        yield folder
        return
    found = _HUB_ID.fullmatch(path)
    if found is None:
        raise FileError(
            f"{path[:200]!r}: no such folder, and no id on the hub, which looks like "
            "org/name or org/name@revision; check the path"
        )
    with TemporaryDirectory(prefix="exl3-") as temporary:
        folder = Path(temporary) / found["repo"].replace("/", "--")
        folder.mkdir()
        fetch_headers(found["repo"], found["revision"], folder)
        yield folder


def fetch_headers(repo: str, revision: str | None, folder: Path) -> None:
    """Lays the JSON files and the headers of a checkpoint on the hub into a folder.

    Args:
        repo: Its id.
        revision: A branch, tag or commit; None for the main branch.
        folder: An empty folder. Its safetensors files get their length, and of their
            bytes only the headers.

    Raises:
        FileError: The repository cannot be reached, or exceeds a bound.
    """
    try:
        from huggingface_hub import errors
    except ImportError:
        raise FileError(
            f"{repo}: no such folder, and for a checkpoint on the hub huggingface_hub "
            "is needed; pip install huggingface_hub"
        ) from None
    name = f"{repo}@{revision}" if revision else repo
    try:
        _Repository(repo, revision).fetch(folder)
    except errors.OfflineModeIsEnabled:
        reason = "HF_HUB_OFFLINE is set; unset it, or name a folder"
    except errors.GatedRepoError:
        reason = "it is gated; ask for access on its page, and set HF_TOKEN"
    except errors.RevisionNotFoundError:
        reason = f"it has no revision {revision}; name another one"
    except errors.RepositoryNotFoundError:
        reason = (
            "there is no such model, or it is private; check the id, or set HF_TOKEN"
        )
    except (errors.HTTPError, errors.HFValidationError, OSError) as error:
        line = " ".join(str(error).split())
        reason = (
            f"{line[:200] or type(error).__name__}; check the network, and HF_ENDPOINT"
        )
    else:
        return
    raise FileError(f"{name}: no such folder, and not read from the hub: {reason}")


class _Repository:
    """Reads ranges of the files of one commit of a repository."""

    def __init__(self, repo: str, revision: str | None):
        from huggingface_hub import HfApi
        from huggingface_hub.utils import build_hf_headers

        self._repo = repo
        info = HfApi().model_info(
            repo, revision=revision, files_metadata=True, timeout=_TIMEOUT
        )
        self._commit = info.sha
        self._siblings: list[Any] = info.siblings or []
        self._headers = build_hf_headers()
        self._left = MAX_TOTAL_BYTES

    def fetch(self, folder: Path) -> None:
        """Lays the files into a folder; see `fetch_headers`."""
        weights: dict[str, int] = {}
        texts: dict[str, int] = {}
        for file in self._siblings:
            name, size = file.rfilename, file.size
            if "/" in name or "\\" in name or not name.isprintable():
                continue
            if name.endswith(".safetensors"):
                files = weights
            elif name.endswith(".json") and not name.startswith(_OTHER_JSON):
                files = texts
            else:
                continue
            if type(size) is not int or not 0 <= size < 2**62:
                raise FileError(f"{self._repo}: the hub gives {name} no size")
            files[name] = size
        if len(weights) + len(texts) > MAX_FILES:
            raise FileError(f"{self._repo}: has more than {MAX_FILES} files")
        for name, size in texts.items():
            if size > MAX_JSON_BYTES:
                raise FileError(
                    f"{name}: has {size} bytes; expected a JSON file of at most "
                    f"{MAX_JSON_BYTES}"
                )
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            done = [
                *pool.map(lambda item: self._text(folder, *item), texts.items()),
                *pool.map(lambda item: self._header(folder, *item), weights.items()),
            ]
        assert len(done) == len(weights) + len(texts)

    def _text(self, folder: Path, name: str, size: int) -> None:
        (folder / name).write_bytes(self._read(name, 0, size))

    def _header(self, folder: Path, name: str, size: int) -> None:
        text = self._read(name, 0, min(size, _FIRST_BYTES))
        # A length that cannot be is left to the reader to refuse.
        end = 8 + int.from_bytes(text[:8], "little")
        if len(text) < end <= min(size, 8 + MAX_HEADER_BYTES):
            text += self._read(name, len(text), end)
        with (folder / name).open("wb") as stream:
            stream.write(text)
            stream.truncate(size)

    def _read(self, name: str, begin: int, end: int) -> bytes:
        """Bytes begin to end of a file."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import hf_raise_for_status, http_stream_backoff

        size = end - begin
        self._left -= size
        if self._left < 0:
            raise FileError(
                f"{self._repo}: has more than {MAX_TOTAL_BYTES} bytes of headers and "
                "JSON files, the most that are read"
            )
        if size == 0:
            return b""
        headers = {**self._headers, "Range": f"bytes={begin}-{end - 1}"}
        # Compressed, a range would be one of the compressed bytes.
        headers["Accept-Encoding"] = "identity"
        url = hf_hub_url(self._repo, name, revision=self._commit)
        options = {"headers": headers, "timeout": _TIMEOUT, "max_retries": _RETRIES}
        found = bytearray()
        with http_stream_backoff("GET", url, **options) as response:
            hf_raise_for_status(response)
            if response.status_code != 206 and begin:
                raise FileError(f"{name}: the hub sends no ranges of it")
            for chunk in response.iter_bytes():
                found += chunk
                if len(found) >= size:  # more, if the server knows no ranges
                    break
        if len(found) < size:
            raise FileError(
                f"{name}: the hub sent {len(found)} of {size} bytes; try again"
            )
        return bytes(found[:size])


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that cannot be one
        return False
