"""An S3 server of this machine, with faults on order: moto's, behind a WSGI layer that refuses, cuts or waits.

Nothing but the loopback interface is used, and it keeps its objects in memory. With STORE_TEST_S3, and the keys as
AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the tests run against another server behind the same layer:
`STORE_TEST_S3=http://127.0.0.1:9000 uv run pytest -m "" -n 0 tests/store`. They empty the bucket `bucket` there.
"""

import contextlib
import functools
import http.client
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"
PER_HOP = {"connection", "keep-alive", "transfer-encoding"}  # headers that say nothing about the content
OTHER = os.environ.get("STORE_TEST_S3", "")
KEY_ID = os.environ["AWS_ACCESS_KEY_ID"] if OTHER else "test-access-key-id"
SECRET = os.environ["AWS_SECRET_ACCESS_KEY"] if OTHER else "test-secret-that-nobody-may-print"
UNHEARD, UNANSWERED = (0, "unheard"), (0, "unanswered")  # answers of a fault: the connection is cut before, or after


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:  # type: ignore[override]
        pass


@dataclass
class Server:
    """A running server.

    Attributes:
        url: of its endpoint.
        requests: of each request: method and path, with the query.
        faults: functions that look at a request's environment and answer None, a status and a code of S3's, or one of
            the two cuts: of a request that nobody has heard, or of one that was served; they may also wait.
    """

    url: str = ""
    requests: list[str] = field(default_factory=list)
    faults: list[Callable[[dict[str, Any]], tuple[int, str] | None]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """What the environment of a process needs to use it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def client(self) -> Any:
        """boto3's, to look at what is there."""
        return _client(self.url)

    def objects(self, prefix: str = "") -> list[str]:
        """Of all objects below a prefix."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return sorted(one["Key"] for page in pages for one in page.get("Contents", []))

    def uploads(self) -> list[str]:
        """Keys of unfinished uploads in parts."""
        return [one["Key"] for one in self.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])]

    def refuse(self, method: str, pattern: str, times: int, status: int = 503, code: str = "SlowDown") -> list[str]:
        """Refuse the next requests of a kind, "P" for PUT and POST; returns a list that fills with those that were."""
        hit: list[str] = []
        lock = threading.Lock()

        def fault(environ: dict[str, Any]) -> tuple[int, str] | None:
            line = f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
            with lock:
                if (
                    len(hit) >= times
                    or not environ["REQUEST_METHOD"].startswith(method)
                    or not re.search(pattern, line)
                ):
                    return None
                hit.append(line)
            return status, code

        self.faults.append(fault)
        return hit


@functools.cache  # making one takes longer than what it is asked for
def _client(url: str) -> Any:
    return boto3.client(
        "s3", endpoint_url=url, aws_access_key_id=KEY_ID, aws_secret_access_key=SECRET, region_name="us-east-1"
    )


def _faulty(server: Server, app: Any) -> Any:
    def serve(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        server.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}")
        for fault in [*server.faults]:
            if answer := fault(environ):
                status, code = answer
                if answer == UNANSWERED:
                    list(app(environ, lambda *_: None))
                if not status:
                    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                    raise ConnectionResetError(code)
                length = int(environ.get("CONTENT_LENGTH") or 0)
                environ["wsgi.input"].read(length)
                body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as ordered: {code}</Message></Error>"
                start(f"{status} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
                return [body.encode()] if environ["REQUEST_METHOD"] != "HEAD" else []
        return app(environ, start)

    return serve


def _forward(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    """Give a request to the other server as it is, since it is signed."""
    names = {"CONTENT_TYPE", "CONTENT_LENGTH"} | {name for name in environ if name.startswith("HTTP_")}
    headers = {name.removeprefix("HTTP_").replace("_", "-").title(): environ[name] for name in names & {*environ}}
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    with contextlib.closing(http.client.HTTPConnection(OTHER.removeprefix("http://"))) as host:
        host.request(environ["REQUEST_METHOD"], environ["RAW_URI"], body, headers)
        answer = host.getresponse()
        start(f"{answer.status} {answer.reason}", [one for one in answer.getheaders() if one[0].lower() not in PER_HOP])
        return [answer.read()]


@contextlib.contextmanager
def run() -> Iterator[Server]:
    """Start a server with an empty bucket, and end it."""
    server = Server()
    app = _faulty(server, _forward if OTHER else create_backend_app("s3"))
    listening = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    server.url = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        if BUCKET not in [one["Name"] for one in server.client().list_buckets()["Buckets"]]:
            server.client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        listening.shutdown()
        thread.join()
