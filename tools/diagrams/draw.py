"""A picture of who holds what, and what is sent when.

A recipe's docstring is all that a picture is made from: its table of what each rank holds, its other tables, and the
sentences that name what a step sends. Words that this program does not know stop it, so no picture shows a guess.
The pictures have a width that a phone shows, their own background, and colors for light and for dark.
"""

import ast
import dataclasses
import html
import itertools
import re
from collections.abc import Iterator, Sequence

from tools.about import ROOT

FOLDER = ROOT / "docs" / "diagrams"
RANKS = 4

WIDTH, MARGIN = 420, 14
LABELS = 106  # width of the column of names, at the left
COLUMN = (WIDTH - 2 * MARGIN - LABELS) / RANKS
BAR = COLUMN - 12  # width of what a rank holds of one thing
STYLE = """\
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-size: 12px; fill: var(--ink) }
.title { font-size: 16px; font-weight: 650 } .head { font-size: 12.5px; font-weight: 650 }
.soft { fill: var(--soft) } .middle { text-anchor: middle } .end { text-anchor: end }
.op { font-weight: 600 } .page { fill: var(--page) } .card { fill: var(--card) }
.empty { fill: none; stroke: var(--line); stroke-width: 1 } .rule { stroke: var(--line); stroke-width: 1 }
.parameters { --c: var(--blue) } .gradients { --c: var(--orange) } .optimizer { --c: var(--green) }
.batch { --c: var(--violet) } .activations { --c: var(--teal) } .numbers { --c: var(--grey) }
.full { fill: var(--c) } .part { fill: var(--c); opacity: .4 }
.sent { stroke: var(--c); stroke-width: 1.1; opacity: .75 }
.maybe { stroke-dasharray: 3 3 } .tip { fill: var(--c) } .brace { fill: none; stroke: var(--soft) }
.hatch { stroke: var(--c); stroke-width: 2.2; opacity: .75 }
svg { --page: #ffffff; --card: #f3f5f8; --ink: #1c2430; --soft: #55606e; --line: #b9c1cc; --blue: #2f6fdb;
  --orange: #d9730d; --green: #2f8f4e; --violet: #8250df; --teal: #128292; --grey: #6b7480 }
@media (prefers-color-scheme: dark) { svg { --page: #10151d; --card: #1a212c; --ink: #e8edf4; --soft: #a3aebc;
  --line: #4a5666; --blue: #6ea2ff; --orange: #f29b4b; --green: #5fc27e; --violet: #b592ff; --teal: #4fc3d3;
  --grey: #9aa6b4 } }"""
# Of what the color is, by words of a row's name or of a sentence; the first that is found counts.
COLORS = {
    "gradients": r"gradient|differences|tied embedding",
    "activations": r"activation|keys and values|its input|outputs|pieces of all|Gram|fronthaul|spectral"
    r"|(of the|all) tokens",
    "optimizer": r"optimizer",
    "numbers": r"statistics|number|sums|norm|clipping|BatchNorm|two more",
    "parameters": r"parameter|weights|access points",
    "batch": r"batch|environment|blocks",
}
OPERATIONS = {
    "all-reduce": r"all-reduces?\b|averages the weights",
    "all-gather": r"all-gathers?\b",
    "reduce-scatter": r"reduce-scatters?\b",
    "all-to-all": r"all-to-all\b|another one back",
    "broadcast": r"broadcast\b",
    "to the next": r"to the next rank|go(?:es)? round|Neighbours send on|the same again, and their gradients go",
    "to the one before": r"they send back",
    "from and to one": r"to the others, and|to rank 0, which",
    "in pairs": r"ranks far and near",
}


# --- What a docstring says ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Table:
    """Column heads, and rows of cells; the first cell of a row is its name."""

    heads: list[str]
    rows: list[list[str]]


@dataclasses.dataclass(frozen=True)
class Message:
    """What is sent in one part of a step.

    Attributes:
        lane: part of the step.
        text: the recipe's words.
        operations: in their order; those that a flag asks for have True.
        scope: "group", "across" the groups, or "all".
        name: of the choice that sends it, such as `ring`; "" if each does.
        column: of the table of what each rank holds, to which alone it belongs; -1 for all.
        about: words that say what is sent, if the text does not.
    """

    lane: str
    text: str
    operations: tuple[tuple[str, bool], ...]
    scope: str = "all"
    name: str = ""
    column: int = -1
    about: str = ""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What its docstring says."""

    name: str
    title: str
    holds: Table
    choices: Table | None  # such as --sync
    said: list[str]  # sentences about what is sent


def tables(lines: Sequence[str]) -> Iterator[Table]:
    """The tables of a docstring: indented lines below a head of several columns that begins with `what` or a flag."""
    for indented, block in itertools.groupby(lines, lambda line: line.startswith("    ")):
        rows = [line.removeprefix("    ") for line in block]
        if not indented or not re.match(r"(what|--[\w-]+)  +\S", rows[0]):
            continue
        starts = [match.start() for match in re.finditer(r"(?:(?<=^)|(?<=  ))\S", rows[0])]
        cells = [
            [line[first:last].strip() for first, last in zip(starts, [*starts[1:], None], strict=True)] for line in rows
        ]
        found: list[list[str]] = []
        for row in cells[1:]:
            if row[0]:
                found.append(row)
            else:  # the row above continues
                found[-1] = [f"{above} {more}".strip() for above, more in zip(found[-1], row, strict=True)]
        yield Table(cells[0], found)


def read(name: str) -> Recipe:
    """A recipe's docstring.

    Raises:
        ValueError: a table is missing.
    """
    text = ast.get_docstring(ast.parse((ROOT / "recipes" / name / "train.py").read_text())) or ""
    return parse(name, text)


def parse(name: str, text: str) -> Recipe:
    """What a docstring says; see `read`."""
    found = {table.heads[0]: table for table in tables(text.splitlines())}
    if "what" not in found:
        raise ValueError(f"{name}: the docstring has no table of what each rank holds")
    paragraphs = re.split(r"\n\s*\n", text.partition("\n    what ")[2])
    prose = " ".join(
        " ".join(one.split())
        for one in itertools.takewhile(lambda one: not re.match(r"    (python|bash|\w+=)", one), paragraphs[1:])
        if not one.startswith("    ")
    )
    said = [one for one in re.split(r"(?<=[.;:]) +", prose) if one]
    return Recipe(
        name,
        text.partition("\n")[0],
        found["what"],
        next((table for head, table in found.items() if head != "what"), None),
        said,
    )


def operations(text: str) -> tuple[tuple[str, bool], ...]:
    """What a sentence sends, in the order of its words, and whether only some runs do."""
    found = [(match.start(), name) for name, words in OPERATIONS.items() for match in re.finditer(words, text)]
    seen: dict[str, bool] = {}
    for start, name in sorted(found):
        before = re.split(r"[,;(]| and ", text[:start])
        seen.setdefault(name, any(re.search(r"\b(with|or)\b", one) for one in before[-2:]) and bool(seen))
    return tuple(seen.items())


def lanes(recipe: Recipe) -> list[str]:
    """The parts of a step."""
    if any("gradients" in row[0] for row in recipe.holds.rows):
        return ["forward pass", "backward pass", "rest of the step"]
    return ["coherence blocks", "end of the drop"]


def lanes_of(recipe: Recipe, text: str) -> list[str]:
    """The parts of a step that a sentence is about."""
    names = lanes(recipe)
    if len(names) == 2:
        return [names["end of the drop" in text or "At the end" in text]]
    if re.search(r"(?<!-)\bafter\b(?!-)|at the end\b", text, re.IGNORECASE):
        return names[-1:]
    found = [name for name in names[:2] if name.split()[0] in text]
    return found or names[-1:]


def scope(text: str) -> str:
    """Who takes part, by the words of a sentence."""
    if re.search(r"Within a group|Inside a replica|Neighbours|they send back|its two stages", text):
        return "group"
    return "across" if re.search(r"^Groups|over the pipelines|^After each", text) else "all"


def messages(recipe: Recipe) -> list[Message]:
    """What a step sends.

    Raises:
        ValueError: no word says what is sent.
    """
    found: list[Message] = []
    inherited: tuple[tuple[str, bool], ...] = ()  # "one all-reduce of this; two of that"
    whose = -1
    listed = False
    for text in recipe.said:
        if others := re.findall(r"\b(\w+_(?:gpt|resnet))(?:'s traffic)?", text) * ("send" in text or "travel" in text):
            found += inherit(recipe, text, others)
        here = operations(text)
        if shared := re.match(r"Ranks that share ([\w ]+?) send ", text):  # of these, each rank then has a part
            (row,) = (row for row in recipe.holds.rows if row[0].endswith(shared[1]))
            (whose,) = (i for i, cell in enumerate(row[1:]) if cell.startswith("a part"))
        listed = text.endswith((";", ":")) or (listed and not here)
        if text.endswith(":") and here:
            inherited = here[:1]
            continue
        more = re.match(r"(and )?(one|two|four|all|a|the)\b.* (of|per|over) |At the end", text)
        here = here or (inherited if more else ())
        if here and not (others and "as in" not in text):
            inherited = here[:1]
            found += [Message(lane, text, here, scope(text), "", whose) for lane in lanes_of(recipe, text)]
    found += chosen(recipe)
    if not found:
        raise ValueError(f"{recipe.name}: its docstring does not say what a step sends")
    return found


def inherit(recipe: Recipe, text: str, others: list[str]) -> Iterator[Message]:
    """The messages of other recipes that a sentence names; of several, each belongs to a column of the table."""
    if "as in" in text and operations(text):
        return  # it says itself what is sent
    for i, other in enumerate(others):
        for one in messages(read(other)):
            who = one.scope if scope(text) == "all" or "Clipping" in one.text else scope(text)
            column = i if len(others) > 1 else -1
            said, sent = one.text, one.operations
            if "HSDP" not in " ".join(recipe.holds.heads).upper():  # it has no groups of replicas
                said = re.sub(r" and, with HSDP, [^.]*", "", said)
                sent = operations(said)
            said = f"As in {other}: {said}"
            yield dataclasses.replace(one, text=said, operations=sent, scope=who, column=column)


def chosen(recipe: Recipe) -> Iterator[Message]:
    """The messages of each choice of a flag, from a table of them."""
    if not recipe.choices:
        return
    heads = recipe.choices.heads
    grouped = heads[0].removeprefix("--").split("-")[0] in axis(recipe.holds)
    for row in recipe.choices.rows:
        who = "group" if grouped else "all"
        if heads[-1] == "when":
            text, when = row[1:]
            lane = lanes(recipe)[-1 if when.startswith("after") else 1]
            yield Message(lane, f"{text}, {when}", operations(text), who, row[0], about=heads[1])
            continue
        before: tuple[tuple[str, bool], ...] = ()
        for head, text in zip(heads[1:], row[1:], strict=True):
            here = operations(text)
            if "the same" in text:  # as in the column before, with what is added
                here = tuple(dict.fromkeys([*before, *here]))
            here = tuple((name, False) for name, _ in here)
            (lane,) = lanes_of(recipe, head)
            yield Message(lane, text, here, who, row[0], about=" ".join(row) if "the same" in text else text)
            before = before or here


# --- Who holds what -------------------------------------------------------------------------------------------


def axis(table: Table) -> str:
    """What divides the ranks into groups, such as `tp`; "" if they are one."""
    said = " ".join([*table.heads, *(cell for row in table.rows for cell in row)])
    said = re.sub(r"\([^)]*\)", "", said)
    if match := re.search(r"N / (\w+) groups", said):
        return match[1]
    match = re.search(r"each (pipeline)|its (replica)\b", said)
    return (match[1] or match[2]) if match else ""


@dataclasses.dataclass(frozen=True)
class Held:
    """What a rank has of one thing, of `of` parts: for the whole step, and for a moment."""

    of: int
    always: frozenset[int]
    briefly: frozenset[int] = frozenset()


def held(name: str, cell: str, rank: int, table: Table) -> Held:
    """What a cell of the table means for a rank, in the row of such a name.

    Raises:
        ValueError: the cell begins with words that are not known.
    """
    grouped = bool(axis(table))
    size = 2 if grouped else RANKS
    group, place = divmod(rank, size)
    every = frozenset(range(RANKS))
    sliced = any("slice" in row[1] for row in table.rows)
    part = place * 2 + group if sliced else rank
    # "with several micro-batches, 1/tp of the gradients until the last one"
    wide = frozenset({2 * place, 2 * place + 1}) if re.search(r"1/tp of the gradients until", cell) else every
    for_a_moment = re.search(r"the whole of .*|[^,]* until the last.*|all keys and values.*|before `prepare`.*", cell)
    whose = re.search(r"gradients|parameters", for_a_moment[0]) if for_a_moment else None  # of several things in a row
    brief = wide if for_a_moment and (not whose or whose[0] == name) else frozenset[int]()
    rules: dict[str, tuple[int, frozenset[int]]] = {
        r"each group: .*each rank: 1/": (RANKS, frozenset({2 * group + place})),
        r"each (group|pipeline): an equal part": (RANKS // size, frozenset({group})),
        r"none\b": (RANKS, frozenset()),
        r"all\b": (RANKS, every),
        r"1/N\b": (RANKS, frozenset({part})),
        r"1/\w+;": (size, frozenset({place})),
        r"(of )?its own layers": (size, frozenset({place})),
        r"(an equal|a) part": (RANKS, frozenset({rank})),
    }
    for words, (of, always) in rules.items():
        if re.match(words, cell):
            return Held(of, always, brief if of == RANKS else (frozenset(range(of)) if brief else brief))
    if re.match(r"a copy, new|of their part", cell):  # a whole one, for a moment
        return Held(RANKS, frozenset(), every)
    raise ValueError(f"what each rank holds begins with words that are not known: '{cell}'")


def panels(table: Table) -> list[tuple[str, list[int]]]:
    """Title of each picture of the ranks, and for each rank its column of the table."""
    heads = table.heads[1:]
    if len(heads) == 1:
        return [("", [0] * RANKS)]
    if "GPU" in heads[0]:  # of one process: the first, and the others
        return [("", [0] + [1] * (RANKS - 1))]
    return [(head, [i] * RANKS) for i, head in enumerate(heads)]


# --- The picture ----------------------------------------------------------------------------------------------


def color(text: str) -> str:
    """The class of what a text is about.

    Raises:
        ValueError: no word is known.
    """
    for name, words in COLORS.items():
        if re.search(words, text, re.IGNORECASE):
            return name
    raise ValueError(f"of what is this: '{text}'?")


def width(text: str) -> float:
    """About how wide a text of 12 pixels is; rather too wide than too narrow."""
    narrow = sum(char in "iljtfr.,;:'|()[] I1-" for char in text)
    wide = sum(char in "mwMWGOQ%@" for char in text)
    return 6.9 * (len(text) - narrow - wide) + 4.5 * narrow + 10.5 * wide


def wrapped(text: str, most: float) -> list[str]:
    """Lines of a text that are at most so wide."""
    lines = [""]
    for word in text.split():
        line = f"{lines[-1]} {word}".strip()
        if width(line) > most and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = line
    return lines


class Drawing:
    """Parts of a picture, from the top down; `y` is where the next one begins."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = float(MARGIN)

    def add(self, tag: str, kind: str, **attributes: float | str) -> None:
        """An element without content."""
        said = " ".join(
            f'{key.replace("_", "-")}="{value:g}"' if isinstance(value, float | int) else f'{key}="{value}"'
            for key, value in attributes.items()
        )
        self.parts.append(f'<{tag} class="{kind}" {said}/>')

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """One line."""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{html.escape(text, quote=False)}</text>')

    def lines(self, x: float, text: str, kind: str, most: float, leading: float = 15.5) -> None:
        """A text that may need several lines, below what there is."""
        for line in wrapped(text, most):
            self.y += leading
            self.text(x, self.y - 4, line, kind)

    def rule(self) -> None:
        """A line over the whole width."""
        self.y += 8
        self.add("line", "rule", x1=MARGIN, y1=self.y, x2=WIDTH - MARGIN, y2=self.y)
        self.y += 6


def middle(rank: int) -> float:
    """Where the column of a rank has its middle."""
    return MARGIN + LABELS + COLUMN * (rank + 0.5)


def bar(drawing: Drawing, rank: int, y: float, high: float, what: Held, partial: bool = False) -> None:
    """What a rank holds of one thing: filled parts, hatched ones that it has for a moment, and outlines."""
    x, each = middle(rank) - BAR / 2, BAR / what.of
    for part in range(what.of):
        at = {"x": x + part * each + 0.75, "y": y, "width": each - 1.5, "height": high, "rx": 1.5}
        if part in what.always:
            drawing.add("rect", "part" if partial else "full", **at)
        else:
            drawing.add("rect", "empty", **at)
            if part in what.briefly:
                drawing.parts.append(f'<g class="hatch">{"".join(hatches(at["x"], y, each - 1.5, high))}</g>')


def hatches(x: float, y: float, wide: float, high: float) -> Iterator[str]:
    """Slanted lines inside a box."""
    at = x - high + 4
    while at < x + wide:
        first, last = max(at, x), min(at + high, x + wide)
        yield f'<line x1="{first:g}" y1="{y + high - (first - at):g}" x2="{last:g}" y2="{y + high - (last - at):g}"/>'
        at += 6


def draw_ranks(drawing: Drawing, table: Table) -> None:
    """The columns' heads, and a brace over each group."""
    unit = "GPU" if any("GPU" in head for head in table.heads) else "rank"
    if name := axis(table):
        word = name if len(name) > 3 else "group"
        for group in range(2):
            first, last = middle(2 * group) - BAR / 2, middle(2 * group + 1) + BAR / 2
            y = drawing.y + 17
            drawing.text((first + last) / 2, y - 4, f"{word} {group}", "soft middle")
            drawing.parts.append(f'<path class="brace" d="M{first:g} {y + 5:g}v-4H{last:g}v4"/>')
        drawing.y += 21
    drawing.y += 16
    for rank in range(RANKS):
        drawing.text(middle(rank), drawing.y - 3, f"{unit} {rank}", "head middle")
    drawing.y += 3


def draw_held(drawing: Drawing, table: Table, columns: list[int]) -> None:
    """A bar of each thing for each rank, and the table's words below."""
    for row in table.rows:
        for name in row[0].split(", "):
            full = {"optimizer": "optimizer state"}.get(name, name)
            drawing.parts.append(f'<g class="{color(full)}">')
            names = wrapped(full, LABELS)
            for i, line in enumerate(names):
                drawing.text(MARGIN, drawing.y + 13 + 12 * i, line, "")
            for rank, column in enumerate(columns):
                bar(drawing, rank, drawing.y + 3, 13, held(full, row[1 + column], rank, table))
            drawing.parts.append("</g>")
            drawing.y += 19 + 12 * (len(names) - 1)
        said = list(dict.fromkeys(row[1 + column] for column in columns))
        text = (
            said[0]
            if len(said) == 1
            else "; ".join(f"{table.heads[1 + column]}: {row[1 + column]}" for column in sorted(set(columns)))
        )
        drawing.lines(MARGIN + LABELS + 6, text, "soft", WIDTH - 2 * MARGIN - LABELS - 14)
        drawing.y += 5


def groups(size: str) -> list[list[int]]:
    """The ranks that send to each other."""
    return {"group": [[0, 1], [2, 3]], "across": [[0, 2], [1, 3]], "all": [[*range(RANKS)]]}[size]


def arrows(operation: str, ranks: list[int]) -> list[tuple[int, int]]:
    """Who sends to whom."""
    if operation == "broadcast":
        return [(ranks[0], other) for other in ranks[1:]]
    if operation == "from and to one":
        return [pair for other in ranks[1:] for pair in ((ranks[0], other), (other, ranks[0]))]
    if operation == "to the next":
        ring = [*ranks[1:], ranks[0]]
        return [*zip(ranks, ring, strict=True)]
    if operation == "in pairs":
        return [(one, one ^ far) for far in (1, 2) for one in ranks]
    return [(one, other) for one in ranks for other in ranks if one != other]


def draw_operation(drawing: Drawing, operation: str, maybe: bool, who: str, text: str, chain: bool) -> None:
    """What each rank has before, who sends to whom, and what each has afterwards."""
    drawing.parts.append(f'<g class="{color(text)}">')
    top, high, gap = drawing.y + 4, 7, 30
    bottom = top + high + gap
    name = wrapped(
        {"from and to one": "through one", "to the next": "to the next rank"}.get(operation, operation), LABELS
    )
    for i, line in enumerate(name):
        drawing.text(MARGIN, top + 27 - 6 * (len(name) - 1) + 13 * i, line, "op")
    every = frozenset(range(RANKS))
    for ranks in groups(who):
        size = len(ranks)
        own = {rank: frozenset({i}) for i, rank in enumerate(ranks)}
        whole = frozenset(range(size))
        sent = arrows(operation, ranks)
        if chain and operation == "to the next":
            sent = sent[:-1]
        if operation == "to the one before":
            sent = [(later, former) for former, later in itertools.pairwise(ranks)]
        for i, rank in enumerate(ranks):
            first, last = {
                "all-reduce": (Held(1, frozenset({0})), Held(1, frozenset({0}))),
                "in pairs": (Held(1, frozenset({0})), Held(1, frozenset({0}))),
                "all-gather": (Held(size, own[rank]), Held(size, whole)),
                "reduce-scatter": (Held(size, whole), Held(size, own[rank])),
                "all-to-all": (Held(size, whole), Held(size, whole)),
                "broadcast": (Held(1, frozenset({0}) if i == 0 else frozenset()), Held(1, frozenset({0}))),
                "from and to one": (Held(1, frozenset({0})), Held(1, frozenset({0}))),
            }.get(operation, (Held(size, every & whole), Held(size, every & whole)))
            if operation in ("to the next", "to the one before"):
                first = Held(1, frozenset({0} if any(one == rank for one, _ in sent) else ()))
                last = Held(1, frozenset({0} if any(other == rank for _, other in sent) else ()))
            sums = operation in ("all-reduce", "reduce-scatter", "in pairs")
            bar(drawing, rank, top, high, first, partial=sums)
            bar(drawing, rank, bottom, high, last)
        for one, other in sent:
            draw_arrow(drawing, one, other, top + high + 2, bottom - 2, maybe)
    drawing.parts.append("</g>")
    drawing.y = bottom + high + 6


def draw_arrow(drawing: Drawing, one: int, other: int, top: float, bottom: float, maybe: bool) -> None:
    """From a rank's upper bar to another's lower one."""
    x1, x2 = middle(one) + 4 * (other - one), middle(other) + 4 * (one - other)
    long = ((x2 - x1) ** 2 + (bottom - top) ** 2) ** 0.5
    ux, uy = (x2 - x1) / long, (bottom - top) / long
    end_x, end_y = x2 - 5 * ux, bottom - 5 * uy
    drawing.add("line", "sent maybe" if maybe else "sent", x1=x1, y1=top, x2=end_x, y2=end_y)
    left = f"{end_x - 2.6 * uy:.1f} {end_y + 2.6 * ux:.1f}"
    right = f"{end_x + 2.6 * uy:.1f} {end_y - 2.6 * ux:.1f}"
    drawing.parts.append(f'<path class="tip" d="M{x2:.1f} {bottom:.1f}L{left}L{right}z"/>')


def draw_sent(drawing: Drawing, recipe: Recipe, column: int) -> None:
    """Each part of a step, with its messages."""
    every = [one for one in messages(recipe) if one.column in (-1, column)]
    shown: set[str] = set()
    for lane in lanes(recipe):
        drawing.y += 6
        drawing.add("rect", "card", x=MARGIN - 6, y=drawing.y, width=WIDTH - 2 * MARGIN + 12, height=20, rx=5)
        drawing.text(MARGIN, drawing.y + 14, f"Sent: {lane}", "head")
        here = [one for one in every if one.lane == lane]
        if not here:
            drawing.text(WIDTH - MARGIN, drawing.y + 14, "nothing", "soft end")
        drawing.y += 22
        for one in here:
            if one.name:
                drawing.lines(MARGIN, f"{recipe.choices.heads[0] if recipe.choices else ''} {one.name}", "head", WIDTH)
            for operation, maybe in one.operations:
                chain = "Neighbours" in one.text
                who = "across" if maybe and "HSDP" in one.text else one.scope
                draw_operation(drawing, operation, maybe, who, one.about or one.text, chain)
            said = "the same again" if one.text in shown else one.text.rstrip(";.")
            drawing.lines(MARGIN + LABELS + 6, said, "soft", WIDTH - 2 * MARGIN - LABELS - 14)
            shown.add(one.text)
            drawing.y += 4


def draw(recipe: Recipe) -> str:
    """The picture, as SVG."""
    drawing = Drawing()
    drawing.y += 18
    drawing.text(MARGIN, drawing.y - 3, recipe.name, "title")
    drawing.lines(MARGIN, recipe.title, "soft", WIDTH - 2 * MARGIN - 12)
    for title, columns in panels(recipe.holds):
        drawing.rule()
        if title:
            drawing.lines(MARGIN, title, "head", WIDTH - 2 * MARGIN)
        draw_ranks(drawing, recipe.holds)
        draw_held(drawing, recipe.holds, columns)
        draw_sent(drawing, recipe, columns[0])
    drawing.rule()
    svg = "\n".join(drawing.parts)
    legend = {
        'class="full"': "Filled: held.",
        'class="hatch"': "Hatched: held for a moment.",
        'class="part"': "Pale: not yet summed.",
        "sent maybe": "Dashed: if asked for.",
    }
    drawing.lines(MARGIN, " ".join(said for what, said in legend.items() if what in svg), "soft", WIDTH - 2 * MARGIN)
    drawing.lines(MARGIN, f"Made from the docstring of recipes/{recipe.name}/train.py", "soft", WIDTH - 2 * MARGIN)
    high = round(drawing.y + MARGIN)
    description = "; ".join(f"{row[0]}: {', '.join(row[1:])}" for row in recipe.holds.rows)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high}" width="{WIDTH}" height="{high}"'
            ' role="img" aria-labelledby="title desc">',
            f'<title id="title">{recipe.name}: who holds what, and what is sent when</title>',
            f'<desc id="desc">{html.escape(description, quote=False)}</desc>',
            f"<style>\n{STYLE}\n</style>",
            f'<rect class="page" width="{WIDTH}" height="{high}" rx="8"/>',
            *drawing.parts,
            "</svg>\n",
        ]
    )
