"""The Hub, by huggingface_hub, which comes with vLLM. What goes wrong is told in words for the pool's owner."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from prefixpool_agent.download.files import DownloadError, File, Listing
from prefixpool_agent.inspection.hub import refusal

_ANSWER_S: Final = 10.0  # a start that needs nothing from the Hub waits no longer for it
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_QUERY: Final = re.compile(r"\?[^\s'\")]*")  # of a URL: where files lie it is signed, and lets its reader in
_CLOSED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


class Hub:
    """One repository. Everything raises DownloadError."""

    def __init__(self, endpoint: str, model: str, cache: Path) -> None:
        self._endpoint = endpoint
        self._host = urlsplit(endpoint).hostname or endpoint
        self._model = model
        self._cache = cache

    def offline(self, revision: str) -> Path | None:
        """Where HF_HUB_OFFLINE is set: what others have put into the cache. None: it is not set."""
        if not constants.HF_HUB_OFFLINE:
            return None
        try:
            return Path(snapshot_download(self._model, revision=revision, cache_dir=self._cache, local_files_only=True))
        except (OSError, ValueError) as error:
            raise DownloadError(f"HF_HUB_OFFLINE is set, and {self._model} is not whole in {self._cache}") from error

    def listing(self, revision: str) -> Listing:
        """All files of a commit, with sizes."""
        try:
            info = HfApi(endpoint=self._endpoint).model_info(
                self._model, revision=revision, files_metadata=True, timeout=_ANSWER_S
            )
        except Exception as error:  # by httpx, its own, and ValueError for names that it does not like
            raise DownloadError(self._told(error, self._model)) from error
        found = ((one.rfilename, one.size or 0, one.lfs.sha256 if one.lfs else one.blob_id) for one in info.siblings or ())
        return Listing(info.sha or revision, tuple(File(name, size, blob or "") for name, size, blob in found))

    def fetch(self, commit: str, name: str) -> Path:
        """One file, into the cache, unless it is there. Waits for whoever is fetching the same one."""
        try:
            path = hf_hub_download(self._model, name, revision=commit, cache_dir=self._cache, endpoint=self._endpoint)
        except Exception as error:  # as above, and whatever a disk may do
            raise DownloadError(self._told(error, name)) from error
        return Path(str(path))

    def _told(self, error: BaseException, what: str) -> str:
        chain = list(_chain(error))
        for one in chain:
            if isinstance(one, HfHubHTTPError) and one.response is not None:
                return refusal(one.response.status_code, what, self._host)
            if isinstance(one, OSError) and one.errno in _FULL:
                return f"no space is left in {self._cache} for {what}"
            if isinstance(one, OSError) and one.errno in _CLOSED:
                return f"{self._cache} cannot be written: {one.strerror}; it must belong to the pod's user or group"
        root = chain[-1]
        why = _QUERY.sub("", " ".join(str(root).split())) or type(root).__name__
        return f"{self._host} does not give {what}: {why}; is it open to pods?"


def _chain(error: BaseException | None) -> list[BaseException]:
    """An error and what it came from."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
