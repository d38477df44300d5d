"""Faults of common/store/: of how a checkpoint is committed in an object store, by one job at a time."""

from tests.mutation.fault import Fault

KEEPER = "tests/store/test_keeper.py"
PATHS = "tests/store/test_paths.py"


def of(module: str, name: str, old: str, new: str, *tests: str) -> Fault:
    """A fault of a module of common/store/."""
    return Fault(f"store/{module}: {name}", f"common/store/{module}.py", old, new, tests)


FAULTS = (
    of(
        "objects/keeper",
        "the files of a checkpoint are not looked at before its manifest is written",
        "        self._look_at(final, files)\n",
        "",
        f"{KEEPER}::test_object_that_vanishes_before_the_commit_is_noticed",
    ),
    of(
        "objects/keeper",
        "a file is there whatever its size is",
        'if found.get(name) != entry["bytes"]:',
        "if False:",
        f"{KEEPER}::test_object_that_vanishes_before_the_commit_is_noticed",
    ),
    of(
        "objects/keeper",
        "the manifest is written before its files are looked at",
        "        self._look_at(final, files)\n        url = str(final / manifest.NAME)\n",
        "        url = str(final / manifest.NAME)\n        uploads.put(url, self._files, manifest.text(facts, files))\n"
        "        self._look_at(final, files)\n",
        f"{KEEPER}::test_object_that_vanishes_before_the_commit_is_noticed",
    ),
    of(
        "objects/lease",
        "a job that has lost its run saves on",
        "            if self.lost:\n                raise OSError",
        "            if False:\n                raise OSError",
        f"{KEEPER}::test_silent_job_loses_its_run_and_cannot_save",
    ),
    of(
        "objects/keeper",
        "the lease is not looked at after the commit",
        "            self._lease.hold()  # who stood still",
        "            pass  # who stood still",
        f"{KEEPER}::test_job_that_loses_its_run_while_it_commits_takes_its_manifest_back",
    ),
    of(
        "objects/keeper",
        "a slow copy costs the lease",
        "        self._copying = threading.Lock()\n",
        "        self._copying = self._turn\n",
        f"{KEEPER}::test_slow_copy_of_a_log_does_not_cost_the_run",
    ),
    of(
        "objects/lease",
        "a lock that is no lock ends the thread that shows life",
        "    except (ValueError, KeyError, TypeError):\n",
        "    except KeyError:\n",
        f"{KEEPER}::test_lock_that_is_no_lock_ends_the_job_at_its_next_save",
    ),
    of(
        "objects/uploads",
        "who writes under a condition does not look itself",
        "    if not heeds and tag is not None and tag_of(url, files) != tag:\n",
        "    if False:\n",
        f"{KEEPER}::test_store_without_conditions_keeps_jobs_apart_and_says_what_it_lacks",
    ),
    of(
        "objects/uploads",
        "all parts of an upload wait in memory",
        "        wait(self._parts[-PARTS : -PARTS + 1] if len(self._parts) >= PARTS else [])\n",
        "",
        f"{KEEPER}::test_few_parts_of_an_upload_are_in_memory",
    ),
    of(
        "objects/uploads",
        "a store that heeds one kind of condition is taken to heed both",
        '({"IfNoneMatch": "*"}, {"IfMatch"',
        '({"IfNoneMatch": "*"},) or ({"IfMatch"',
        f"{KEEPER}::test_store_without_conditions_keeps_jobs_apart_and_says_what_it_lacks",
    ),
    of(
        "objects/uploads",
        "parts that were sent do not count as progress",
        '        manifest.looks_at(f"{self._url}, part {number}")\n        return {',
        "        return {",
        f"{KEEPER}::test_large_files_travel_in_parts",
    ),
    of(
        "objects/keeper",
        "unfinished uploads of records stay",
        "if not uploads.abort_unfinished(self.path, self._files):",
        'if not uploads.abort_unfinished(self.path / "checkpoints", self._files):',
        f"{KEEPER}::test_unfinished_uploads_in_parts_are_found_and_removed",
    ),
    of(
        "objects/lease",
        "a job takes itself for another one",
        '                    if self._about["start"] in text:',
        "                    if False:",
        f"{KEEPER}::test_job_whose_sign_of_life_was_not_answered_keeps_its_run",
    ),
    of(
        "objects/lease",
        "a second job does not wait for a sign of life",
        '            if not owner or folder == self._about["folder"] or time.monotonic() > end:\n',
        "            if True:\n",
        f"{KEEPER}::test_second_job_is_refused_while_the_first_lives",
    ),
    of(
        "objects/keeper",
        "a step of another job is replaced",
        "        if tag and str(final) not in self._known:\n",
        "        if False:\n",
        f"{KEEPER}::test_step_that_another_job_has_saved_is_not_replaced",
    ),
    of(
        "objects/keeper",
        "what killed saves have left stays",
        "        self._remove(one for one in everything if one not in kept and one.parent != folder)\n",
        "",
        f"{KEEPER}::test_after_a_cut_at_each_request_the_old_or_the_new_one_is_there",
    ),
    of(
        "objects/keeper",
        "a damaged manifest is one that names no files",
        "kept |= {file for file in everything if file.parent == one.parent}",
        "pass",
        f"{KEEPER}::test_damaged_manifest_of_an_older_checkpoint_takes_nothing_from_others",
    ),
    of(
        "objects/keeper",
        "a damaged manifest ends what removes older checkpoints",
        "            except (ValueError, KeyError, TypeError):  # it is damaged",
        "            except FileExistsError:  # it is damaged",
        f"{KEEPER}::test_damaged_manifest_of_an_older_checkpoint_takes_nothing_from_others",
    ),
    of(
        "objects/keeper",
        "the note to the launcher is copied",
        '"working_folder", log.STOPPED}',
        '"working_folder"}',
        f"{KEEPER}::test_note_to_the_launcher_stays_on_its_machine",
    ),
    of(
        "objects/uploads",
        "writes have no condition",
        'condition = {} if tag is None else {"IfMatch"',
        'condition = {} if tag != "never" else {"IfMatch"',
        f"{KEEPER}::test_conditional_put",
    ),
    of(
        "objects/uploads",
        "only the first page of unfinished uploads is read",
        'if not found.get("IsTruncated"):',
        "if True:",
        f"{KEEPER}::test_all_pages_of_unfinished_uploads_are_read",
    ),
    of(
        "objects/paths",
        "a folder without a manifest is a checkpoint",
        "if one.name == manifest.NAME and one.parent.parent == self)",
        "if one.parent.parent == self)",
        f"{KEEPER}::test_what_no_manifest_names_is_no_checkpoint",
    ),
    of(
        "objects/reader",
        "each piece of a tensor is its first",
        "begin = first + (item.storage_offsets[0] + row) * row_bytes",
        "begin = first + item.storage_offsets[0] * row_bytes",
        f"{PATHS}::test_rank_reads_the_rows_that_it_needs",
    ),
    of(
        "objects/client",
        "an error shows secrets",
        'text = text.replace(value, f"${name}")',
        "pass",
        f"{PATHS}::test_words_hold_no_secret",
    ),
    Fault(
        "store: what fails after a commit drops its files",
        "common/state/saver.py",
        "            partial = final  # committed",
        "            pass  # committed",
        (f"{KEEPER}::test_what_fails_after_the_commit_drops_nothing_of_it",),
    ),
    of(
        "place",
        "a typo is a folder",
        'STORES = re.compile("(s3|gs|az|hf)://")',
        'STORES = re.compile("(s3|gs|az|hf):/")',
        "tests/store/test_place.py::test_other_urls_are_refused",
    ),
)
