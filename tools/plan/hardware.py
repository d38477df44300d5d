"""What machines can do: the table hardware.toml, and files of one's own in the same form."""

import dataclasses
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import UserError

FILE = Path(__file__).with_name("hardware.toml")
KNOWN = Path(__file__).with_name("known.json")  # what benchmarks/plan.py has fitted and compared


@dataclass(frozen=True)
class Reach:
    """Fractions of peaks that trainings achieve; `launch` and `latency` multiply the seconds of those.

    `attention` is of what attention's kernels could reach. `contention` is the share of the time in which FSDP
    sends during computation by which the step is longer: NCCL's kernels take multiprocessors and memory from it, and a
    layer waits for its own parameters.
    """

    products: float = 0.77
    convolutions: float = 0.4
    memory: float = 0.8
    link: float = 0.75
    network: float = 0.75
    launch: float = 1.0
    latency: float = 1.0
    attention: float = 0.77
    contention: float = 0.0


@dataclass(frozen=True)
class Hardware:
    """One kind of machine; hardware.toml says what each field means, and in which unit."""

    name: str
    peak_16bit: float
    peak_float32: float
    memory_gib: float
    memory_bandwidth: float
    local_size: int
    link_bandwidth: float
    network_bandwidth: float
    peak_tf32: float = 0.0
    peak_attention: float = 0.0
    peak_exp: float = 0.0
    gpu: str = ""  # "" for a CPU
    family: str = ""  # of machines whose achieved fractions were fitted together
    bfloat16: bool = True
    link_latency_s: float = 10e-6
    network_latency_s: float = 20e-6
    launch_s: float = 6e-6
    storage_bandwidth: float = 2e9
    mtbf_hours: float = 50_676.0
    reach: Reach = Reach()

    @property
    def device(self) -> str:
        """Its type in torch."""
        return "cuda" if self.gpu else "cpu"

    @property
    def memory_bytes(self) -> float:
        """Of one device."""
        return self.memory_gib * 2**30

    def peak(self, dtype: str) -> float:
        """FLOP/s of a type of torch; float64 counts as half of float32."""
        if dtype in ("bfloat16", "float16"):
            return self.peak_16bit
        return {"tf32": self.peak_tf32 or self.peak_float32, "float64": self.peak_float32 / 2}.get(
            dtype, self.peak_float32
        )


def table(file: Path = FILE) -> dict[str, Hardware]:
    """All machines of a file, by name.

    Raises:
        UserError: the file is not TOML, or a machine lacks a value or has an unknown one.
    """
    try:
        read = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"--hardware {file}: {error}: give a file like tools/plan/hardware.toml") from error
    return {name: of(name, values, file) for name, values in read.items()}


def of(name: str, values: object, file: Path) -> Hardware:
    """A machine, of the values that a file has for it."""
    if not isinstance(values, dict):
        raise UserError(f"--hardware {file}: {name} = {values!r} is outside of a machine: write it below a [NAME]")
    fields = {field.name: field for field in dataclasses.fields(Hardware)}
    needed = {one for one, field in fields.items() if field.default is dataclasses.MISSING} - {"name"}
    reach = values.get("reach", {})
    unknown = {*values} - {*fields} | {*reach} - {field.name for field in dataclasses.fields(Reach)}
    if unknown or needed - {*values}:
        wrong = (
            f"does not know {', '.join(sorted(unknown))}"
            if unknown
            else f"lacks {', '.join(sorted(needed - {*values}))}"
        )
        raise UserError(
            f"--hardware {file}: [{name}] {wrong}: its fields are {', '.join(sorted({*fields} - {'name'}))}"
        )
    for key, value in {**values, **reach}.items():
        is_number = isinstance(value, (int, float)) and (value > 0 or (key == "contention" and value == 0))
        if key not in ("gpu", "family", "bfloat16", "reach") and not is_number:
            raise UserError(f"--hardware {file}: [{name}] {key} = {value!r} must be a number above 0")
    known: dict[str, Any] = {**values, "name": name, "reach": Reach(**(fitted(str(values.get("family", ""))) | reach))}
    return Hardware(**known)


def fitted(family: str) -> dict[str, float]:
    """The achieved fractions that were fitted to measurements of a family, or of all GPUs if it has none."""
    found: dict[str, dict[str, float]] = json.loads(KNOWN.read_text())["reach"] if KNOWN.exists() else {}
    return found.get(family, found.get("gpu", {})) if family else {}


def find(name: str) -> Hardware:
    """A machine of the table, by name, or the machine of one's own file, as --calibrate writes it.

    Raises:
        UserError: there is none of that name.
    """
    if name.endswith(".toml"):
        machines = list(table(Path(name)).values())
        if len(machines) != 1:
            raise UserError(f"--hardware {name} has {len(machines)} machines: keep one [NAME] in it")
        return machines[0]
    known = table()
    if name not in known:
        raise UserError(
            f"--hardware {name} is not known: use {', '.join(known)}, or a file.toml with figures of your own, as "
            "tools/plan/hardware.toml has them and --calibrate writes them"
        )
    return known[name]


def save(machine: Hardware, file: Path, comment: str) -> None:
    """Write one machine, in the form of the table."""

    def lines(values: dict[str, object]) -> list[str]:
        shown = {key: f'"{value}"' if isinstance(value, str) else str(value).lower() for key, value in values.items()}
        return [f"{key} = {value}" for key, value in shown.items()]

    empty = {field.name for field in dataclasses.fields(machine) if not getattr(machine, field.name)}  # not known
    values = {key: value for key, value in dataclasses.asdict(machine).items() if key not in empty or value is False}
    name, reach = values.pop("name"), values.pop("reach")
    text = [f"# {comment}", f"[{name}]", *lines(values), "", f"[{name}.reach]", *lines(reach)]
    file.write_text("\n".join(text) + "\n")
