"""Ask a store through fsspec, imported at the first use: again while it is busy, and with words for what it says."""

import functools
import io
import os
import random
import re
import sys
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, TypeVar

Result = TypeVar("Result")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "hf": "huggingface_hub", "memory": "fsspec"}
FIRST_S = 0.2  # between two tries, and twice as long each time
MOST_S = 20.0


def filesystem(scheme: str) -> Any:
    """What reads and writes a store, with the credentials and the endpoint that its own tools would take."""
    # The environment counts: a process may be one of several runs in turn.
    return _filesystem(scheme, tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_"))))


@functools.cache
def _filesystem(scheme: str, _: tuple[tuple[str, str], ...]) -> Any:
    import fsspec

    more: dict[str, Any] = {}
    if scheme == "s3":
        # One request at a time is tried again here, where it is counted and said; SSL and DNS are the client's.
        limits = {"retries": {"max_attempts": 1}, "connect_timeout": 20, "read_timeout": 60, "max_pool_connections": 32}
        # What is read at once is small: s3fs would first ask for its size, to read it in parts beside each other.
        more = {"config_kwargs": limits, "anon": bool(os.environ.get("AWS_ANONYMOUS")), "max_concurrency": 1}
    files = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=scheme != "memory", **more)
    if scheme == "s3":
        files.retries = 1
    return files


def size_and_tag(url: str, files: Any) -> tuple[int, str]:
    """Of an object, in one request; only S3 has tags, which change with its content.

    Raises:
        FileNotFoundError: there is none, though there may be objects below that name; see also `ask`.
    """
    if hasattr(files, "call_s3"):  # its `info` would list what is below a name, if nothing has it
        bucket, key, _ = files.split_path(url)
        found = ask(url, "looked at", lambda: files.call_s3("head_object", Bucket=bucket, Key=key))
        return found["ContentLength"], found["ETag"]
    found = ask(url, "looked at", lambda: files.info(url))
    if found["type"] != "file":
        raise FileNotFoundError(url)
    return found["size"], ""


def ask(path: Any, verb: str, call: Callable[[], Result]) -> Result:
    """Call the store, again and again while it is busy or away, for up to STORE_RETRY_S seconds (120).

    Raises:
        FileNotFoundError, FileExistsError, PermissionError: of the store; another try would change nothing.
        UnsupportedOperation: the store does not have this request; an OSError.
        OSError: it was busy or away for all that time.
    """
    began = time.monotonic()
    pause = FIRST_S
    told = False
    limit = float(os.environ.get("STORE_RETRY_S", "120"))
    while True:
        try:
            return call()
        except Exception as error:
            said = words(error)
            if isinstance(error, FileNotFoundError | FileExistsError):
                raise
            if isinstance(error, PermissionError):
                raise PermissionError(f"{path} could not be {verb}: {said}") from None
            if _status(error) == HTTPStatus.NOT_IMPLEMENTED:
                raise io.UnsupportedOperation(f"{path} could not be {verb}: {said}") from None
            if not _passes(error):
                raise OSError(f"{path} could not be {verb}: {said}") from None
            waited = time.monotonic() - began
            if waited + pause > limit:
                raise OSError(f"{path} could not be {verb} for {waited:.0f} s: {said}") from None
            if not told and pause > 8 * FIRST_S:
                told = True
                sys.stderr.write(f"note: {path} could not be {verb} so far, trying for up to {limit:.0f} s: {said}\n")
        time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 (so that ranks do not come at once)
        pause = min(2 * pause, MOST_S)


def _passes(error: BaseException) -> bool:
    """Whether a fault may be over at the next try: a busy store, or a connection, and no wrong request."""
    if status := _status(error):
        return status >= 500 or status in (408, 409, 429)
    named = {kind.__name__ for kind in type(error).__mro__}
    if named & {"NoCredentialsError", "ParamValidationError", "NoRegionError"}:
        return False
    return bool(named & {"OSError", "HTTPClientError", "BotoCoreError", "ClientError", "IncompleteRead"})


def _status(error: BaseException) -> int:
    """Of HTTP; 0 if there was no answer."""
    return int(getattr(error.__cause__, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def words(error: BaseException) -> str:
    """An error in one line, without what the environment keeps secret."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    for name, value in os.environ.items():
        if re.search("SECRET|TOKEN|PASSWORD|_KEY", name) and len(value) > 5:
            text = text.replace(value, f"${name}")
    return re.sub(r"\?\S*", "?...", text)[:500]
