"""How a process ends: a refusal is printed once, by rank 0 if it can; a crash reaches torchrun."""

import multiprocessing
import os
import time
from pathlib import Path

import torch.distributed as dist
from common import UserError
from common.protect import watch
from common.run import exits, process_group
from common.run.process import Process

from tests.harness import runner


def refuse(told: str) -> None:
    """All ranks find the same mistake."""

    @exits.entry
    def main(_: Process) -> None:
        """Meant for nothing."""
        raise UserError(told)

    assert main.__name__ == "main"
    main()


def test_refusal_is_told_once_without_a_traceback() -> None:
    result = runner.spawn(refuse, [("--lr must be positive",)] * 2)
    assert result.codes[0] == 2
    assert result.outputs[0] == "error: --lr must be positive\n"
    assert result.outputs[1] == "", "rank 1 leaves the word to rank 0"


def refuse_on_rank_1() -> None:
    exits.GRACE_S = 0.01

    @exits.entry
    def main(_: Process) -> None:
        if os.environ["RANK"] == "1":
            raise UserError("this rank alone")

    main()


def test_refusal_that_rank_0_has_not_reached_is_told_too() -> None:
    result = runner.spawn(refuse_on_rank_1, [(), ()])
    assert result.codes == [0, 1]
    assert "UserError: this rank alone" in result.outputs[1]


def refuse_while_another_joins(joins_s: float) -> None:
    @exits.entry
    def main(process: Process) -> None:
        world = process_group.start(process=process)
        process.watch = watch.Watch(world)
        if dist.get_rank() == 1:
            time.sleep(joins_s)
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
        world.store.set(str(dist.get_rank()), "there")  # rank 0 keeps the store
        raise UserError("--dtype float8")

    main()


def test_rank_0_does_not_leave_while_others_join_a_group() -> None:
    result = runner.spawn(refuse_while_another_joins, [(0.2,)] * 2)
    assert result.codes[0] == 2
    assert result.outputs == ["error: --dtype float8\n", ""]


def crash(error_file: str) -> None:
    os.environ["TORCHELASTIC_ERROR_FILE"] = error_file

    @exits.entry
    def main(_: Process) -> None:
        raise ZeroDivisionError("a defect")

    main()


def test_crash_reaches_the_summary_of_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    result = runner.spawn(crash, [(str(path),)])
    assert result.codes == [1]
    assert "ZeroDivisionError: a defect" in result.outputs[0]
    assert "ZeroDivisionError: a defect" in path.read_text()


def crash_beside_a_worker() -> None:
    @exits.entry
    def main(_: Process) -> None:
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True).start()
        raise ZeroDivisionError("a defect")

    main()


def test_crash_does_not_wait_for_workers() -> None:
    """They hold back SIGTERM, so Python would wait for ever; the mutant ends no worker, and only the test ends it."""
    result = runner.spawn(crash_beside_a_worker, [()])
    assert result.codes == [1]
    assert "ZeroDivisionError: a defect" in result.outputs[0]
    result = runner.spawn(without_an_end_of_workers, [()], timeout_s=8)
    assert result.codes == [-9]


def without_an_end_of_workers() -> None:
    exits._end_workers = lambda: None
    crash_beside_a_worker()
