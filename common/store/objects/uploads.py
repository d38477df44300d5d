"""Write objects: large ones in parts that travel beside each other, small ones under a condition."""

import base64
import contextlib
import functools
import io
import zlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Self

from common import manifest
from common.store.objects.client import ask, size_and_tag

PART_BYTES = 2**24  # of the first parts, larger ones follow: S3 takes 10,000, and 5 TB
PARTS = 4  # on their way at once: what an upload holds in memory, beside the one that is being filled


class Upload:
    """An object that is being written. It is there once the upload was closed, whole; after an error it is not."""

    def __init__(self, url: str, files: Any) -> None:
        """Begin; a store of another kind than S3 gets its parts one after the other, by fsspec."""
        self._url = url
        self._files = files
        self._filled = bytearray()
        self._num_bytes = 0
        self._parts: list[Future[dict[str, Any]]] = []
        self._pool = ThreadPoolExecutor(PARTS, "upload")
        self._number = ""  # the store's name of this upload
        self._plain = None if hasattr(files, "call_s3") else files.open(url, "wb", block_size=PART_BYTES)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def write(self, block: Any) -> int:
        """Add bytes; waits while as many parts as may be are on their way."""
        self._num_bytes += len(block)
        if self._plain:
            manifest.looks_at(f"{self._url}, byte {self._num_bytes}")
            return int(self._plain.write(block))
        self._filled += block
        if len(self._filled) >= PART_BYTES * (1 + len(self._parts) // 1000):
            self._send()
        return len(block)

    def _send(self) -> None:
        if not self._number:
            self._number = self._call("create_multipart_upload", ChecksumAlgorithm="CRC32")["UploadId"]
        content = self._filled
        self._filled = bytearray()
        wait(self._parts[-PARTS : -PARTS + 1] if len(self._parts) >= PARTS else [])
        self._parts.append(self._pool.submit(self._part, len(self._parts) + 1, content))

    def _part(self, number: int, content: bytearray) -> dict[str, Any]:
        # The store computes it as well, and refuses a part whose bytes have changed on their way.
        crc = base64.b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()
        sent = self._call(
            "upload_part", UploadId=self._number, PartNumber=number, Body=bytes(content), ChecksumCRC32=crc
        )
        manifest.looks_at(f"{self._url}, part {number}")
        return {"PartNumber": number, "ETag": sent["ETag"], "ChecksumCRC32": crc}

    def _call(self, name: str, **more: Any) -> Any:
        bucket, key, _ = self._files.split_path(self._url)
        return ask(self._url, "written", lambda: self._files.call_s3(name, Bucket=bucket, Key=key, **more))

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Finish, and compare the size that the store has; or give up.

        Raises:
            OSError: it could not be written.
        """
        try:
            if kind:
                return
            if self._plain:
                self._plain.close()
            elif self._number:
                if self._filled:
                    self._send()
                parts = [one.result() for one in self._parts]
                self._call("complete_multipart_upload", UploadId=self._number, MultipartUpload={"Parts": parts})
                self._number = ""
            else:  # in one piece, whose length the store knows
                self._call("put_object", Body=bytes(self._filled))
                return
            found = size_and_tag(self._url, self._files)[0]
            if found != self._num_bytes:
                raise OSError(f"{self._url} has {found} bytes, and {self._num_bytes} were sent")
        finally:
            self._pool.shutdown(cancel_futures=True)
            if self._number:
                self._abort()

    def _abort(self) -> None:
        """Let the store drop the parts; what it does not drop now, the next save finds."""
        bucket, key, _ = self._files.split_path(self._url)
        try:
            self._files.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=self._number)
        except Exception:  # it is away, and the error that has led here says so
            self._number = ""


def tag_of(url: str, files: Any) -> str:
    """What `put` takes for "if it is still that"; "" if there is no such object.

    Raises:
        OSError: the store does not say.
    """
    try:
        if hasattr(files, "call_s3"):
            return size_and_tag(url, files)[1]
        return bytes(ask(url, "read", lambda: files.cat_file(url))).decode()
    except FileNotFoundError:
        return ""


def read_tagged(url: str, files: Any) -> tuple[str, str]:
    """An object's text, and its tag; "" and "" if there is none.

    Raises:
        OSError: it cannot be read.
    """
    # In this order, a change in between makes the text too new for the tag, and the condition fails.
    tag = tag_of(url, files)
    if not tag or not hasattr(files, "call_s3"):
        return tag, tag
    try:
        return bytes(ask(url, "read", lambda: files.cat_file(url))).decode(), tag
    except FileNotFoundError:
        return "", ""


def _put_if(files: Any, bucket: str, key: str, content: bytes, condition: dict[str, str]) -> str:
    try:
        return str(files.call_s3("put_object", Bucket=bucket, Key=key, Body=content, **condition)["ETag"])
    except Exception as error:
        code = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code", "")
        if code in ("PreconditionFailed", "412", "ConditionalRequestConflict"):
            raise FileExistsError(f"{bucket}/{key}") from None
        raise


def put(url: str, files: Any, text: str, tag: str | None = None, heeds: bool = False) -> str:
    """Write a small object in one request; returns the tag that it has now.

    Args:
        url: of the object.
        files: its store.
        text: its content.
        tag: None to replace whatever is there; "" only if nothing is; else only if it is still what `tag_of` gave.
        heeds: whether the store was seen to heed conditions, so that it alone looks, in one step with the writing.

    Raises:
        FileExistsError: there is one, or another one by now.
        OSError: it could not be written.
    """
    if not heeds and tag is not None and tag_of(url, files) != tag:
        raise FileExistsError(url)
    if not hasattr(files, "call_s3"):
        mode = "create" if tag == "" else "overwrite"
        ask(url, "written", lambda: files.pipe_file(url, text.encode(), mode=mode))
        return text
    bucket, key, _ = files.split_path(url)
    condition = {} if tag is None else {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}
    try:
        return ask(url, "written", lambda: _put_if(files, bucket, key, text.encode(), condition))
    except io.UnsupportedOperation:
        return ask(url, "written", lambda: _put_if(files, bucket, key, text.encode(), {}))
    except FileExistsError:
        # A try whose answer was lost may have written it.
        found, now = read_tagged(url, files)
        if found != text:
            raise
        return now


def heeds_conditions(url: str, files: Any) -> bool:
    """Whether the store refuses to write where an object is, and where it is another one; this one stays the same.

    Raises:
        OSError: it cannot be asked.
    """
    if not hasattr(files, "call_s3"):
        return False
    bucket, key, _ = files.split_path(url)
    # Of the same content: a store that does not heed a condition changes nothing.
    content = ask(url, "read", lambda: files.cat_file(url))
    try:
        for condition in ({"IfNoneMatch": "*"}, {"IfMatch": f'"{"0" * 32}"'}):
            with contextlib.suppress(FileExistsError):
                ask(url, "written", functools.partial(_put_if, files, bucket, key, content, condition))
                return False
    except io.UnsupportedOperation:
        return False
    return True


def abort_unfinished(folder: Any, files: Any) -> bool:
    """Let S3 drop the parts of uploads below a folder that were never finished: nobody sees them, somebody pays.

    Returns:
        False if the store does not list them.

    Raises:
        OSError: they cannot be listed or dropped.
    """
    if not hasattr(files, "call_s3"):
        return True  # the others drop them by themselves, after a week
    bucket, prefix, _ = files.split_path(f"{folder}/")
    markers: dict[str, str] = {}

    def call(name: str, **more: str) -> Any:
        return ask(folder, "freed of unfinished uploads", lambda: files.call_s3(name, Bucket=bucket, **more))

    while True:  # 1,000 a page
        try:
            found = call("list_multipart_uploads", Prefix=prefix, **markers)
        except io.UnsupportedOperation:
            return False
        for one in found.get("Uploads", []):
            if one["Key"].startswith(prefix):
                with contextlib.suppress(FileNotFoundError):
                    call("abort_multipart_upload", Key=one["Key"], UploadId=one["UploadId"])
        if not found.get("IsTruncated"):
            return True
        markers = {"KeyMarker": found["NextKeyMarker"], "UploadIdMarker": found["NextUploadIdMarker"]}
