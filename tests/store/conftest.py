"""A store for each test, and the environment that leads to it."""

from collections.abc import Iterator

import pytest

from tests.store import server


@pytest.fixture(scope="module")
def running() -> Iterator[server.Server]:
    with server.run() as one:
        yield one


@pytest.fixture
def s3(running: server.Server, monkeypatch: pytest.MonkeyPatch) -> server.Server:
    """An empty bucket; a store that stays away is given up at once, and a silent job soon."""
    running.faults.clear()
    for key in running.objects():
        running.client().delete_object(Bucket=server.BUCKET, Key=key)
    running.requests.clear()
    for name, value in {**running.env, "STORE_RETRY_S": "0", "STORE_LEASE_S": "1"}.items():
        monkeypatch.setenv(name, value)
    return running
