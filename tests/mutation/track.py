"""Faults of common/track/: of who sends a run's records, how often, and what its failure does."""

from tests.mutation.fault import Fault

RECIPE = "tests/track/test_recipe.py"
SEND = "tests/track/test_send.py"


def of(module: str, name: str, old: str, new: str, *tests: str) -> Fault:
    """A fault of a module of common/track/."""
    return Fault(f"track/{module}: {name}", f"common/track/{module}.py", old, new, tests)


FAULTS = (
    of(
        "tracker",
        "every rank sends",
        "    if not name or world.rank != 0:\n",
        "    if not name:\n",
        f"{RECIPE}::test_stopped_and_resumed_is_one_run",
    ),
    of(
        "tracker",
        "the end of the run waits as long as the tracker likes",
        "        sender.kill()\n",
        "        pass\n",
        f"{SEND}::test_process_that_does_not_end_is_killed",
    ),
    of(
        "send",
        "a tracker that hangs holds the end of the run up",
        "        os._exit(0)\n",
        "        return\n",
        f"{RECIPE}::test_tracker_that_fails_ends_nothing[hangs-it has not answered for 1 s]",
    ),
    of(
        "send",
        "a run that continues is another one",
        '        self._id = known["id"]\n',
        '        self._id = ""\n',
        f"{SEND}::test_run_that_continues_is_the_same_and_repeats_nothing",
    ),
    of(
        "send",
        "records are sent again",
        " if record[0] > self._sent]",
        "]",
        f"{SEND}::test_run_that_continues_is_the_same_and_repeats_nothing",
    ),
    of(
        "send",
        "records that a tracker refuses are lost",
        "            self._service.log(step, {tag",
        "            del self.left[0]\n            self._service.log(step, {tag",
        f"{SEND}::test_refused_records_are_sent_later_with_one_warning",
    ),
    of(
        "send",
        "what a tracker raises ends the sending",
        "            except Exception as error:  # whatever a tracker raises\n",
        "            except OSError as error:\n",
        f"{RECIPE}::test_tracker_that_fails_ends_nothing[raises-RuntimeError: no such run (token $STAND_IN_TOKEN)]",
    ),
    of(
        "send",
        "each failure is a warning",
        "                if not warned:\n",
        "                if True:\n",
        f"{SEND}::test_refused_records_are_sent_later_with_one_warning",
    ),
    of(
        "send",
        "a run whose ranks were killed has ended well",
        "        done.append(sys.stdin.buffer.read() == services.DONE)\n",
        "        done.append(bool(sys.stdin.buffer.read()) or True)\n",
        f"{RECIPE}::test_ranks_that_are_killed_leave_the_run_to_the_next_start",
    ),
    of(
        "send",
        "an error is printed with its secrets",
        '            text = text.replace(value, f"${name}")\n',
        "            pass\n",
        f"{SEND}::test_words_hold_no_secret",
    ),
    of(
        "services",
        "wandb continues as another run",
        "id=about.id or None, ",
        "",
        f"{RECIPE}::test_tracker[wandb-of_wandb]",
    ),
    of(
        "services",
        "mlflow continues as another run",
        "    if about.id:\n",
        "    if False:\n",
        f"{RECIPE}::test_tracker[mlflow-of_mlflow]",
    ),
    of(
        "services",
        "trackio continues as another run",
        '"allow" if about.id else "never"',
        '"never"',
        f"{RECIPE}::test_tracker[trackio-of_trackio]",
    ),
)
