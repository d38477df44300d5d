"""The heartbeats of all ranks in the store: who is to blame, as far as they show it."""

import json
import time

from common.protect import diagnose
from common.protect.heartbeat import BEAT_S, DEAD_S, Heartbeat
from common.run import process_group
from common.run.process import World


class Peers:
    """Compares this rank with the others.

    Attributes:
        store: of the ranks, over a connection of its own: the main thread may be waiting in the store itself.
        num_beats: heartbeats that this rank has published.
    """

    def __init__(self, world: World, heart: Heartbeat) -> None:
        """Begin with nothing published."""
        self.store = world.store.clone()
        self.num_beats = 0
        self._rank = world.rank
        self._size = world.size
        self._heart = heart
        self._next_beat = ""  # the next rank's heartbeat, and for how many of this rank's own it has stayed the same
        self._next_same = 0

    def publish(self) -> diagnose.Beat:
        """Renew this rank's heartbeat, and return it."""
        beat = self._heart.look()
        self.store.set(f"watch/{self._rank}", json.dumps(beat))
        self.num_beats += 1
        return beat

    def finding(self) -> str:
        """Which rank is to blame; "" while nobody has published that."""
        return self.store.peek(process_group.FINDING)

    def publish_finding(self, finding: str) -> str:
        """Publish a finding unless there is one already; returns the one that counts."""
        return self.store.compare_set(process_group.FINDING, "", finding).decode()

    def accuse(self, stalled: bool) -> None:
        """Compare the heartbeats, and publish who is to blame, if anybody."""
        beats, dead = self.compare()
        accused = self._heart.own_freeze() or diagnose.accuse_dead(beats, dead)
        if accused := accused or (diagnose.accuse_stalled(beats) if stalled else ""):
            self.publish_finding(accused)

    def next_is_silent(self) -> bool:
        """Whether the next rank's process has ended, or gives no heartbeat for too long."""
        beat = self.store.peek(f"watch/{(self._rank + 1) % self._size}")
        self._next_same = self._next_same + 1 if beat == self._next_beat else 0
        self._next_beat = beat
        # Counted in own heartbeats, so that time in which the whole job was suspended does not count.
        silent_s = self._next_same * BEAT_S
        if not beat or silent_s < DEAD_S:
            return False
        return silent_s >= self._heart.silence_s() or self._heart.has_died(json.loads(beat))

    def announce_exit(self) -> None:
        """Let rank 0 know that this rank is about to exit, so that it counts as settled, not as dead."""
        self.store.set(f"watch/{self._rank}/exits", "")

    def exits(self, rank: int) -> bool:
        """Whether a rank has announced that."""
        return self.store.check([f"watch/{rank}/exits"])

    def compare(self, to_the_end: bool = False) -> tuple[list[diagnose.Beat], set[int]]:
        """Read the heartbeats of all ranks for `DEAD_S`; returns them, and the ranks whose heartbeat has stopped.

        It ends early when there is a finding, or a process of this machine that has ended. To the end means: when all
        others have ended, or are about to.
        """
        keys = [f"watch/{rank}" for rank in range(self._size)]
        others = {*range(self._size)} - {self._rank}
        first = now = [self.store.peek(key) for key in keys]
        dead: set[int] = set()
        end = time.monotonic() + DEAD_S
        while time.monotonic() < end and (to_the_end or not self.finding()):
            self.publish()
            now = [self.store.peek(key) for key in keys]
            dead = {rank for rank, beat in enumerate(now) if beat == first[rank]}
            ended = {rank for rank, beat in enumerate(now) if beat and self._heart.has_died(json.loads(beat))}
            if all(rank in ended or self.exits(rank) for rank in others) if to_the_end else ended:
                dead = ended
                break
            time.sleep(BEAT_S)
        unknown = {"phase": "its start", "stack": "", "waits_in": "", "stalled_s": 0.0, "limit_s": 0.0}
        unknown |= {"spun_s": 0.0, "spins_s": 0.0}
        beats = [json.loads(beat) if beat else unknown | {"rank": r, "name": f"rank {r}"} for r, beat in enumerate(now)]
        return beats, dead
