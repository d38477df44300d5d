"""tools.judge: each planted mistake is named by its line, and right scripts are judged without an alarm."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools.judge import __main__ as command
from tools.judge import findings, page, symptoms

from tests.harness import judged, libraries, pages, planted, runner, shapes, twins
from tools import about

ONE_EACH = ("set_epoch is missing", "sum of gradients", "not all ranks come")  # of the data, of numbers, of a hang
PAGE = (about.ROOT / "docs" / "judge.md").read_text()
KNOWN = {one.kind for one in judged.MISTAKES}
# Said of a script in one process, such as dp_resnet/bare.py below.
UNPLANTED = {"no torch.distributed"}


def judge(folder: str, names: list[str]) -> None:
    """Judge all scripts of a folder, one after the other, in one process whose forks are the ranks."""
    from tools.judge import report, verdict

    os.chdir(folder)
    for name in names:
        one = report.as_json(verdict.judge(verdict.Asked(Path(name), timeout_s=runner.HANG_S)))
        print("verdict: " + json.dumps(json.loads(one)), flush=True)


def verdicts(folder: Path, scripts: dict[str, str]) -> dict[str, dict]:
    """What the judge says of each script."""
    for name, text in scripts.items():
        (folder / name).write_text(text)
    result = runner.spawn(judge, [(str(folder), list(scripts))], timeout_s=2 * runner.HANG_S)
    assert result.ok, str(result)
    found = [json.loads(line) for line in re.findall(r"^verdict: (.*)", result.outputs[0], re.MULTILINE)]
    assert len(found) == len(scripts)
    return dict(zip(scripts, found, strict=True))


def of(verdict: dict) -> set[tuple[str, int]]:
    """Kind and line of each finding."""
    return {(one["kind"], int(one["at"].rpartition(":")[2])) for one in verdict["findings"]}


def test_mistakes_apply() -> None:
    """Each is a program, and its line is found in it; the scripts without are the twins."""
    for one in judged.MISTAKES:
        compile(one.text(), one.id, "exec")
        assert one.number() > 1
    assert findings.KINDS.keys() - KNOWN == UNPLANTED
    assert findings.KINDS.keys() >= KNOWN


def test_one_of_each(tmp_path: Path) -> None:
    """A mistake of the data, one of the numbers, a hang; and beside them a script without a mistake."""
    chosen = [next(one for one in judged.MISTAKES if one.kind == kind) for kind in ONE_EACH]
    scripts = {f"{i}.py": one.text() for i, one in enumerate(chosen)} | {"right.py": judged.SCRIPTS["images"]}
    found = verdicts(tmp_path, scripts)
    for i, one in enumerate(chosen):
        assert (one.kind, one.number()) in of(found[f"{i}.py"]), (one.id, found[f"{i}.py"])
    assert (found["right.py"]["code"], found["right.py"]["findings"]) == (0, [])
    assert {path.name for path in tmp_path.iterdir()} == scripts.keys()  # what they save stays away


@pytest.mark.rest
@pytest.mark.parametrize("script", judged.SCRIPTS)
def test_mistake_is_named(script: str, tmp_path: Path) -> None:
    """All mistakes of one script by their lines, and no error or warning that is not there."""
    own = [one for one in judged.MISTAKES if one.script == script]
    found = verdicts(
        tmp_path, {f"{i}.py": one.text() for i, one in enumerate(own)} | {"right.py": judged.SCRIPTS[script]}
    )
    missed = [one.id for i, one in enumerate(own) if (one.kind, one.number()) not in of(found[f"{i}.py"])]
    assert not missed
    assert found["right.py"]["code"] == 0, found["right.py"]


WRITES = """
import os, socket, subprocess
for number, action in enumerate((
    lambda: open("{outside}/new", "w"),
    lambda: os.remove("{outside}/old"),
    lambda: socket.create_connection(("192.0.2.1", 9), timeout=1),
    lambda: subprocess.run(["touch", "{outside}/new"]),
)):
    try:
        action()
    except PermissionError as error:
        assert "the judge" in str(error)
        continue
    raise SystemExit(f"action {{number}} was allowed")
open("inside", "w").write("this stays in the judge's folder")
raise ValueError("all refused")
"""


def test_nothing_outside(tmp_path: Path) -> None:
    """No file, no connection, no program; and a script that fails is said to, with its line."""
    outside, own = tmp_path / "outside", tmp_path / "own"
    outside.mkdir()
    own.mkdir()
    (outside / "old").write_text("")
    text = WRITES.format(outside=outside)
    found = verdicts(own, {"writes.py": text})["writes.py"]
    line = text.splitlines().index('raise ValueError("all refused")') + 1
    assert found["code"] == 2
    assert found["failed"].startswith(f"writes.py:{line}: ValueError: all refused")
    assert [path.name for path in own.iterdir()] == ["writes.py"]
    assert [path.name for path in outside.iterdir()] == ["old"]


@pytest.mark.rest
def test_sleep_is_no_hang(tmp_path: Path) -> None:
    """Both ranks wait, and not for each other."""
    text = judged.BY_HAND.replace("    optimizer.step()\n", "    optimizer.step()\n    time.sleep(9 * (step == 1))\n")
    found = verdicts(tmp_path, {"sleeps.py": "import time\n" + text})["sleeps.py"]
    assert found["failed"].startswith("nothing was computed for 4 s: "), found
    assert not any(one["level"] != "note" for one in found["findings"])


def test_script_that_refuses_its_flags(tmp_path: Path) -> None:
    """The user reads what the script said."""
    text = "import argparse as a\np = a.ArgumentParser()\np.add_argument('--size', required=True)\np.parse_args()\n"
    found = verdicts(tmp_path, {"asks.py": text})["asks.py"]
    assert (found["code"], found["findings"]) == (2, [])
    assert found["failed"].endswith("the following arguments are required: --size")


@pytest.mark.parametrize("words", [["--steps", "0", "x.py"], ["no_such.py"], [], ["--html", "none/x.html", __file__]])
def test_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        command.parse(words)
    assert error.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.rest
def test_as_people_call_it(tmp_path: Path) -> None:
    """The command: a page that names the line, and the exit code."""
    one = next(one for one in judged.MISTAKES if one.kind == "set_epoch is missing")
    (tmp_path / "train.py").write_text(one.text())
    env = os.environ | {"PYTHONPATH": str(about.ROOT)}
    words = [sys.executable, "-m", "tools.judge", "train.py"]
    done = subprocess.run(
        words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=runner.HANG_S, check=False
    )
    assert done.returncode == 1, done.stderr
    assert f"train.py:{one.number()}: error: set_epoch is missing: " in done.stdout


@pytest.mark.rest
@pytest.mark.parametrize("recipe", twins.TWINS)
def test_twin_without_alarm(recipe: str, tmp_path: Path) -> None:
    """A bare.py of this repository: one of a language model as it is, the others with a small one."""
    path = about.ROOT / "recipes" / recipe / "bare.py" if recipe == "ddp_gpt" else twins.write_small(recipe, tmp_path)
    words = [sys.executable, "-m", "tools.judge", "--json", "--no-gpu", "--timeout", str(runner.HANG_S)]
    words.append(str(path))
    done = subprocess.run(words, cwd=about.ROOT, capture_output=True, text=True, timeout=3 * runner.HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = [one["kind"] for one in json.loads(done.stdout)["findings"]]
    assert kinds == (["no torch.distributed"] if recipe == "dp_resnet" else [])


RECIPES = [path.parent.name for path in sorted(about.ROOT.glob("recipes/*/train.py"))]
FLAGS = {"diloco_gpt": ["--inner-steps", "2"]}  # so that its replicas meet within these steps
NOT_JUDGED = {
    "dp_resnet": "error: nn.DataParallel needs 1 process, not 2: NPROC_PER_NODE=1, or recipes/ddp_resnet",
    "cellfree_mimo": "no optimizer made a step",
}


@pytest.mark.rest
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_without_alarm(recipe: str) -> None:
    """A train.py of this repository, with a small model; and for two of them, why there is nothing to judge."""
    small = () if runner.workload(recipe) == "resnet" else runner.small(recipe)  # that of images is small
    words = [sys.executable, "-m", "tools.judge", "--json", "--no-gpu", "--once", "--timeout", str(runner.HANG_S)]
    words += [f"recipes/{recipe}/train.py", "--max-steps", "8", *small, *FLAGS.get(recipe, [])]
    done = subprocess.run(words, cwd=about.ROOT, capture_output=True, text=True, timeout=3 * runner.HANG_S, check=False)
    found = json.loads(done.stdout)
    assert found["failed"].endswith(NOT_JUDGED.get(recipe, "")), found
    assert [done.returncode, bool(found["failed"])] == ([2, True] if recipe in NOT_JUDGED else [0, False]), found
    assert not any(one["level"] != "note" for one in found["findings"])


def test_pages_have_the_tables() -> None:
    """docs/judge.md says of each kind what the code says; docs/troubleshooting.md names each once."""
    assert pages.parts(PAGE)["kinds"].strip() == page.table()
    troubles = (about.ROOT / "docs" / "troubleshooting.md").read_text()
    assert pages.parts(troubles)["symptoms"].strip() == page.symptoms()
    named = [kind for kinds in symptoms.SYMPTOMS.values() for kind in kinds]
    assert sorted(named) == sorted(findings.KINDS)


def test_example_of_the_page(tmp_path: Path) -> None:
    """All but the losses, and the last line, which has seconds."""
    parts = (pages.parts(PAGE)[name].strip().strip("`").partition("\n")[2] for name in ("script", "verdict", "port"))
    script, verdict, port = parts
    (tmp_path / "train.py").write_text(script)
    words = [sys.executable, "-m", "tools.judge", "--port", "--timeout", str(runner.HANG_S), "--html", "page.html"]
    words.append("train.py")
    environ = os.environ | {"PYTHONPATH": str(runner.ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    shown, said = (
        [line for line in text.strip().splitlines() if not line.startswith(("loss on ", "train.py: "))]
        for text in (verdict + port, done.stdout)
    )
    assert said == shown
    assert "train.py: 4 errors, 1 warning, 2 notes (" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "train.py"], "the script writes nothing"
    html = (tmp_path / "page.html").read_text()
    assert html.count("<polyline") == 2
    assert html.count("<h2>") == 7 + 1  # the findings, and how it was judged
    assert '<span class="named">  18          optimizer.step()</span>' in html


def test_rules_apply() -> None:
    """Each of the random mistakes is possible in a script, which then names a kind and has a line for it."""
    found = planted.everything()
    assert {one.kinds for one in found} == {one.kinds for one in planted.RULES}
    assert all(one.lines for one in found)
    assert {kind for one in found for kind in one.kinds} <= findings.KINDS.keys()
    assert planted.choose(3, 1) == planted.choose(3, 1) != planted.choose(3, 2)


@pytest.mark.rest
@pytest.mark.parametrize("first", range(0, len(shapes.ALL), 10))
def test_public_shapes_without_alarm(first: int, tmp_path: Path) -> None:
    """Scripts as public projects have them."""
    scripts = {f"{i}.py": text for i, text in enumerate(shapes.ALL.values())}
    found = verdicts(tmp_path, dict([*scripts.items()][first : first + 10]))
    alarms = {name: one for name, one in found.items() if one["code"]}
    assert not alarms


LIBRARY = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Linear(4, 2)).eval()
model.module.train()
optimizer = torch.optim.AdamW(model.module.parameters())
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
def closure():
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss
for step in range(4):
    optimizer.step(closure)
    schedule.step()
found = torch.empty(4)
dist.all_gather_into_tensor(found, torch.zeros(1, 2))
state = {"epoch": 1, "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [schedule.state_dict()]}
if dist.get_rank() == 0:
    torch.save(state, "last.ckpt")
dist.destroy_process_group()
"""


def test_habits_of_libraries(tmp_path: Path) -> None:
    """A step that computes its gradients itself, a DDP in eval mode, states in lists, shapes that only NCCL accepts."""
    wrong = LIBRARY.replace("    optimizer.zero_grad()", "    pass")
    part = LIBRARY.replace("AdamW(model.module.parameters())", "AdamW([model.module.bias])")
    found = verdicts(tmp_path, {"right.py": LIBRARY, "wrong.py": wrong, "part.py": part})
    assert (found["right.py"]["code"], found["right.py"]["failed"]) == (0, ""), found["right.py"]
    line = 1 + LIBRARY.splitlines().index("    optimizer.step(closure)")
    assert of(found["wrong.py"]) == {("zero_grad is missing", line)}
    line = 1 + next(i for i, one in enumerate(part.splitlines()) if "AdamW" in one)
    assert of(found["part.py"]) == {("parameters without optimizer", line)}


def test_library_mistakes_apply() -> None:
    """Each is a program, and names a kind; benchmarks/judge_libraries.py judges them."""
    for one in libraries.MISTAKES:
        compile(one.text(), one.what, "exec")
    assert {one.kind for one in libraries.MISTAKES} - {""} <= findings.KINDS.keys()
    assert {one.framework for one in libraries.MISTAKES} == libraries.SCRIPTS.keys() == libraries.PACKAGES.keys()


@pytest.mark.rest
@pytest.mark.parametrize("library", ["the Trainer of transformers", "Accelerate"])
def test_library_without_alarm(library: str, tmp_path: Path) -> None:
    """The group dev has these; the group bench has Lightning too."""
    found = verdicts(tmp_path, {"train.py": libraries.SCRIPTS[library]})["train.py"]
    assert (found["code"], found["failed"]) == (0, ""), found


def test_own_processes(tmp_path: Path) -> None:
    """A script that starts its own: a mistake in what they do is named."""
    text = re.sub(r"^( *)optimizer\.zero_grad\(\)\n", r"\1pass\n", shapes.ALL["processes by hand"], flags=re.MULTILINE)
    found = verdicts(tmp_path, {"own.py": text})["own.py"]
    line = next(i for i, one in enumerate(text.splitlines(), 1) if "optimizer.step()" in one)
    assert ("zero_grad is missing", line) in of(found)
    assert {kind for kind, _ in of(found)} == {
        "zero_grad is missing",
        "GPU without a question",
    }  # each rank has its part
