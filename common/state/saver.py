"""Write checkpoints, each complete or absent: all ranks write beside the old ones, then rank 0 commits by one rename.

Every part of a save is all or nothing over the ranks (`_together`): each rank does its share, all exchange the results,
and if one rank failed, all drop the checkpoint.
"""

import gc
import hashlib
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from common import BadStateError, UserError, ranks
from common.run.process import Process
from common.run.process_group import SAVING
from common.state import checkpoint, replicas, retention, shards, start
from common.state.state_check import StateCheck

Tensors = dict[str, torch.Tensor]
LOST = "the connection to another rank was lost"


class SaveError(UserError):
    """A rank could not write its part of a checkpoint; the older checkpoints are unchanged."""

    everywhere = True


class TakenOverError(SaveError):
    """Another job has taken the run over."""


class Saver:
    """Writes the checkpoints of one run, in the background if asked to."""

    def __init__(
        self, found: start.Found, mesh: DeviceMesh, check: StateCheck, process: Process, keep: int, in_background: bool
    ) -> None:
        """Create a process group for saving: background saves must not mix with training collectives (all ranks).

        Args:
            found: the run's place, its fingerprint, and whether it has a checkpoint already. A first one has to
                succeed: perhaps none ever can.
            mesh: the ranks and their axes.
            check: looks at what is written before it is committed.
            process: this one, with which the saves end.
            keep: undamaged checkpoints to keep; older ones are deleted after each commit.
            in_background: copy the state and write it while the training continues; at most one save at a time.
        """
        self._place = found.place
        self._retention = retention.Retention(keep, self._together)
        self._group = _new_group()
        self._facts = found.fingerprint | {
            "recipe": Path(process.recipe).resolve().parent.name,
            "world": dist.get_world_size(),
            "mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
            "versions": ranks.versions(),
            "checked": check.kinds,
        }
        self._check = check
        self._process = process
        self._stager = _new_stager() if in_background else None
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        self._pending: threading.Thread | None = None
        self._failure: UserError | None = None  # of the save in progress, until `_settle` on this rank only
        self._has_one = found.newest >= 0
        # After an error, only a little: the other ranks are exiting too.
        process.background.callback(self.wait, 10)

    def save(
        self, step: int, tensors: Tensors, samples: int, last: bool, best: int = -1, loss_scale: Sequence[float] = ()
    ) -> None:
        """Write and commit `checkpoints/step_<step>`; a kill before the final rename does not touch the older ones.

        Args:
            step: optimizer steps done.
            tensors: this rank's state by canonical name (all ranks take part).
            samples: samples consumed so far.
            last: the run ends after this step, so the save is not in the background and must succeed.
            best: a step whose checkpoint is kept beside the newest ones; -1 for none.
            loss_scale: state of the guard's loss scale.

        Raises:
            SaveError: the run's first or last checkpoint could not be written. Another one that fails only causes a
                warning.
            BadStateError: this state, or the one written in the background before, must not be kept.
        """
        self.drain()
        facts = self._facts | {"step": step, "samples": samples} | ({"loss_scale": loss_scale} if loss_scale else {})
        if self._stager and not last:
            staged = self._stager.stage(tensors)
            if torch.__version__ < "2.13":  # there the first use spoils a stager; later ones use its buffers again
                self._stager = _new_stager()
            self._pending = threading.Thread(target=self._write, args=(staged, facts, best), name="save", daemon=True)
            self._pending.start()
            return
        self._write(tensors, facts, best)
        try:
            self._settle(last)
        except SaveError as error:
            if not last or not self._place.spare or isinstance(error, TakenOverError):
                raise
            self._write_here(tensors, facts, error)

    def _write_here(self, tensors: Tensors, facts: dict[str, Any], error: SaveError) -> None:
        """Write the last checkpoint to this machine's disk, after its own place did not take it (all ranks).

        Raises:
            SaveError: the same, and where it lies, or why it does not lie here either.
        """
        self._place = self._place.spare
        path = checkpoint.folder(self._place.path, facts["step"])
        try:
            self._write(tensors, facts, -1)
            self._settle(last=True)
        except SaveError as here:
            raise SaveError(f"{error}. It was not saved to {path} either: {here}") from None
        raise SaveError(f"{error}. It was saved to {path} instead: continue with --resume {path} and another --name")

    def wait(self, most_s: float | None = None) -> None:
        """Wait for a save in progress, whatever comes of it; `watch` notices one that never ends."""
        if self._pending:
            self._pending.join(most_s)

    def drain(self) -> None:
        """Wait for a save in progress, and warn if it failed, or raise if it was the first one (all ranks).

        Raises:
            SaveError: the run's first checkpoint could not be written.
            BadStateError: the state must not be kept.
        """
        if self._pending:
            self._pending.join()
            self._pending = None
            self._settle(last=False)

    def _settle(self, last: bool) -> None:
        """Let all ranks know what has failed, and raise or warn; make a new group if one has left that of the save."""
        state = self._group is None, self._place.lost
        outcomes = ranks.gather((str(self._failure or ""), getattr(self._failure, "step", None), *state))
        self._failure = None
        if any(left for *_, left, _ in outcomes):
            self._leave()
            self._group = _new_group()
        for text, step, *_ in outcomes:
            if step is not None:
                raise BadStateError(text, step)
        # The cause before its effects.
        failure = min((text for text, *_ in outcomes if text), key=lambda text: LOST in text, default="")
        if not failure:
            self._has_one = True
            return
        lost = any(lost for *_, lost in outcomes)
        if last or lost or not self._has_one:
            which = "last" if last else "next" if lost else "first"
            raise (TakenOverError if lost else SaveError)(f"the {which} checkpoint was not saved: {failure}")
        ranks.print0(f"warning: {failure}; training continues")

    def _leave(self) -> None:
        """Close this rank's connections for saving: the others, which may wait for this rank, then fail at once."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = None
        gc.collect()  # what refers to the group keeps the connections open

    def _write(self, tensors: Tensors, facts: dict[str, Any], best: int) -> None:
        """Write one checkpoint (all ranks), perhaps in a thread of its own; a failure is stored in `_failure`."""
        import torch.distributed.checkpoint as dcp  # slow to import, for a flag that is refused

        # A thread begins on GPU 0, and torch's writer asks for its stream: every rank would take memory there.
        torch.cuda.set_device(self._gpu)
        alone = False
        partial = final = checkpoint.folder(self._place.path, facts["step"])
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        try:
            made = self._together(lambda: self._place.make(final, needed) if dist.get_rank() == 0 else None)
            partial = self._place.partial(made[0])
            writer = shards.ShardWriter(partial, dist.get_rank())
            # A tensor that several ranks hold is taken from the lowest: BatchNorm's running statistics differ between
            # ranks, and mixing them would match no rank.
            planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
            dcp.save(self._share(tensors), storage_writer=writer, planner=planner, process_group=self._group)
            parts = self._together(lambda: self._seal(writer, tensors))
            files = {name: entry for part, _ in parts for name, entry in part.items()}
            self._check.judge([summary for _, summary in parts], facts["step"])
            self._together(lambda: self._place.commit(partial, final, facts, files) if dist.get_rank() == 0 else None)
            partial = final  # committed: whatever fails from here on drops nothing of it
            self._retention.tidy(self._place, final, best)
        except (Exception, dcp.CheckpointException) as error:  # CheckpointException derives from BaseException
            # These are raised on all ranks, others on one alone.
            alone = not isinstance(error, SaveError | dcp.CheckpointException | BadStateError)
            failure = SaveError(f"no checkpoint of step {facts['step']}: {self._explain(error, alone)}")
            self._failure = error if isinstance(error, BadStateError) else failure
            if dist.get_rank() == 0 and partial != final:
                self._place.drop(partial)
        if alone:  # now that the error no longer refers to the group
            self._leave()

    def _share(self, tensors: Tensors) -> Tensors:
        """The tensors that this rank writes: ranks that hold the same parts take some each (all ranks)."""
        parts = sorted(name + replicas.part(tensor) for name, tensor in tensors.items())
        held = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        same = [rank for rank, theirs in enumerate(self._together(lambda: held)) if theirs == held]
        writers = dict.fromkeys(tensors, same[0])
        load = dict.fromkeys(same, 0)
        for name in sorted(filter(self._check.is_shared, tensors), key=lambda name: (-tensors[name].numel(), name)):
            writers[name] = min(same, key=load.__getitem__)
            load[writers[name]] += tensors[name].numel()
        return {name: tensors[name] for name, rank in writers.items() if rank == dist.get_rank()}

    def _seal(self, writer: shards.ShardWriter, tensors: Tensors) -> tuple[dict[str, Any], list[Any]]:
        """Flush this rank's file; returns its entry in the manifest, and the check's summary of the tensors.

        The check is computed while the disk writes, and after the file was written, so that nothing that changed
        meanwhile is kept either.
        """
        entry = writer.seal()
        with ThreadPoolExecutor(1, "flush") as pool:
            flushed = pool.submit(writer.flush, self._place.flush)
            summary = self._check.summarize(tensors)
            flushed.result()
        return entry, summary

    def _together(self, part: Callable[[], Any]) -> list[Any]:
        """Let every rank do its part; every rank gets all results, JSON values, or every rank raises SaveError."""
        try:
            outcome = (part(), "")
        except Exception as error:
            outcome = (None, self._describe(error))
        outcomes = ranks.gather(outcome, self._group)
        if faults := [fault for _, fault in outcomes if fault]:
            raise SaveError("; ".join(faults))
        return [result for result, _ in outcomes]

    def _describe(self, error: BaseException) -> str:
        self._process.explain(error)
        said = "; ".join(filter(None, [str(error), *getattr(error, "__notes__", [])]))
        return f"rank {dist.get_rank()} on {socket.gethostname()}: {type(error).__name__}: {said}"

    def _explain(self, error: BaseException, alone: bool) -> str:
        """The cause of a failed save in one line, with the free space: torch and safetensors wrap it in many."""
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # it is not a disk; `watch` names the rank
            return LOST
        text = self._describe(error) if alone else str(error)
        full = any(sign in text for sign in ("No space left", "Errno 28", "os error 28", "unexpected pos"))
        return f"{'disk full: ' if full else ''}{text.strip().splitlines()[-1]} ({self._place.room()})"


def _new_stager() -> Any:
    """Copies tensors into plain memory of the CPU, before `stage` returns."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(StagingOptions(False, False, False, False))


def _new_group() -> Any:
    # `watch` ends a save in which nothing moves; one in which bytes come in may take its time.
    return dist.new_group(backend="gloo", group_desc=SAVING, timeout=timedelta(days=1))
