"""Print what .wandb files hold: the rows of the history, and the configuration. `python read_wandb.py FILE...`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from wandb.proto import wandb_internal_pb2

HEADER = 7  # bytes of the file's own
BLOCK = 2**15  # of LevelDB's log: pieces of 4 bytes CRC, 2 length, 1 kind (1 whole, 2 first, 3 middle, 4 last)


def pieces(content: bytes) -> Iterator[bytes]:
    at = HEADER
    record = b""
    while at < len(content):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        length = int.from_bytes(content[at + 4 : at + 6], "little")
        kind = content[at + 6]
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


rows = []
config = {}
for file in sys.argv[1:]:
    for piece in pieces(Path(file).read_bytes()):
        record = wandb_internal_pb2.Record.FromString(piece)
        updates = [*record.run.config.update, *record.config.update]
        config |= {one.key: json.loads(one.value_json) for one in updates if one.key}
        if record.HasField("history"):
            items = record.history.item
            row = {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items}
            rows.append(row | {"_step": record.history.step.num})
print(json.dumps([rows, config]))
