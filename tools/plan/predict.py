"""From a rank's work and a machine to seconds: a latency-bandwidth-overlap model, every formula with its source.

products  = sum over types of FLOPs / (peak * reach), but not less than their bytes / memory bandwidth: the roofline
            of https://doi.org/10.1145/1498765.1498785, and attention
attention = (FLOPs / their peak + exponentials / their peak) / reach of attention, in kernels that hold their scores:
            the narrower the heads, the more exponentials, which other units compute (section 3.1 of
            https://arxiv.org/abs/2407.08608: 989 TFLOP/s beside 3.9e12 exponentials a second)
memory    = bytes of all other operators / (memory bandwidth * reach)
launches  = operators * seconds of a launch; on a GPU, they run beside the device, on a CPU before each operator
computed  = max(products + memory, launches) on a GPU, their sum on a CPU
a call    = steps * latency + factor * bytes / bandwidth, for n ranks: an all-reduce moves 2 (n - 1) / n of its
            bytes, an all-gather, a reduce-scatter and an all-to-all (n - 1) / n, a message and a broadcast all
            (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), in 2 log2 n, log2 n and one steps
            (trees: https://doi.org/10.1177/1094342005051521); on CPUs, gloo sends an all-reduce for a reduce-scatter
            (https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp)
bandwidth = of links within a machine; over machines, of the network, times the group's ranks on a machine, as
            each sends to another one over a port of its own, and not more than that of the links
exposed   = what hides behind nothing, and of what hides behind the last backward pass (2/3 of a micro-batch's
            computation) or behind all computation, what is longer than that, but at least one call; and of what FSDP
            sends during computation, the reach of contention
step      = computed / (1 - idle) + exposed, where idle is the pipeline's bubble
MFU       = model FLOPs / (step * peak * ranks) (https://arxiv.org/abs/2204.02311, appendix B)
a save    = state bytes / (storage bandwidth * machines)
interval  = sqrt(2 save (MTBF / ranks)) between saves: Young 1974, https://doi.org/10.1145/361147.361115; Daly's
            higher order (https://doi.org/10.1016/j.future.2004.11.016) where a save is shorter than 2 MTBF
lost      = save / interval + (interval / 2 + recovery) / MTBF, the share of time for saves and after failures
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.plan.hardware import Hardware
from tools.plan.work import Traffic, Work

FACTORS = {"all-reduce": 2.0, "broadcast": 1.0, "send": 1.0}  # of others, 1
BACKWARD = 2 / 3  # of a micro-batch's computation
SOAK = Path(__file__).resolve().parents[2] / "docs" / "measured" / "soak.md"
HOUR_S = 3600.0


@dataclass(frozen=True)
class Prediction:
    """What a step will take, and what failures will; seconds, bytes, and shares of 1.

    Attributes:
        step_s: of one training step.
        products_s: of it, matrix products, attention and convolutions.
        memory_s: of it, all other operators.
        launch_s: of it, launches that nothing hides.
        bubble_s: of it, waiting for other stages.
        exposed_s: of it, sending while nothing is computed.
        hidden_s: sending while something is computed.
        mfu: of 16-bit peak, by the model's FLOPs.
        efficiency: samples a second and rank, beside those of a rank that sends nothing and waits for nobody.
        peak_bytes: of memory, on the rank that needs most.
        save_s: to write a checkpoint.
        interval_s: between saves, that loses least.
        lost: share of time that saves and failures take.
    """

    step_s: float
    products_s: float
    memory_s: float
    launch_s: float
    bubble_s: float
    exposed_s: float
    hidden_s: float
    mfu: float
    efficiency: float
    peak_bytes: float
    save_s: float
    interval_s: float
    lost: float


def recovery_s() -> float:
    """Seconds from a failure to a step beyond the one it hit, as the soak test has measured them with a small state."""
    found = re.search(r"from a fault to a step beyond the one it hit \| median ([\d.]+) s", SOAK.read_text())
    assert found, f"{SOAK} has no median"
    return float(found[1])


def seconds(traffic: Traffic, machine: Hardware) -> float:
    """Of all calls of one kind over one group."""
    n, kind = traffic.ranks, traffic.kind
    if n <= 1 and kind != "send":
        return 0.0
    if kind == "reduce-scatter" and machine.device == "cpu":
        kind = "all-reduce"
    reach = machine.reach
    bandwidth, latency = machine.link_bandwidth * reach.link, machine.link_latency_s
    if traffic.machines > 1:
        together = 1 if kind == "send" else n / traffic.machines
        bandwidth = min(bandwidth, machine.network_bandwidth * reach.network * together)
        latency = machine.network_latency_s
    steps = {"all-reduce": 2 * math.log2(n), "send": 1.0}.get(kind, math.log2(n))
    share = 1.0 if kind in ("send", "broadcast") else (n - 1) / n
    return traffic.calls * steps * latency * reach.latency + FACTORS.get(kind, 1.0) * share * traffic.bytes / bandwidth


def computed(work: Work, machine: Hardware) -> tuple[float, float, float]:
    """Seconds of products, of other operators, and of launches that nothing hides."""
    reach = machine.reach
    bandwidth = machine.memory_bandwidth * reach.memory
    products = sum(count / machine.peak(dtype) for dtype, count in work.flops.items()) / reach.products
    convolutions = sum(count / machine.peak(dtype) for dtype, count in work.convolutions.items()) / reach.convolutions
    products = max(products + convolutions, work.product_bytes / bandwidth) + attended(work, machine)
    memory = work.elementwise_bytes / bandwidth
    launches = work.kernels * machine.launch_s * reach.launch
    if machine.device == "cuda":  # what is left of them when the device has nothing to do
        launches = math.hypot(products + memory, launches) - products - memory
    return products, memory, launches


def attended(work: Work, machine: Hardware) -> float:
    """Seconds of attention's kernels: of their products, and of their exponentials where the data sheet has those."""
    share = machine.peak_attention / machine.peak_16bit if machine.peak_attention else 1.0
    products = sum(count / (machine.peak(dtype) * share) for dtype, count in work.attention.items())
    exponentials = work.exponentials / machine.peak_exp if machine.peak_exp else 0.0
    return (products + exponentials) / machine.reach.attention


def of_rank(work: Work, machine: Hardware) -> dict[str, float]:
    """The parts of one rank's step, in seconds."""
    products, memory, launches = computed(work, machine)
    busy = products + memory + launches
    windows = {"backward": BACKWARD * busy / work.micro_batches, "step": busy, "engine": busy}
    exposed = hidden = 0.0
    for kind in ("no", *windows):
        some = [one for one in work.traffic if one.hidden == kind]
        sends = [seconds(one, machine) for one in some]
        if kind == "no":
            exposed += sum(sends)
        elif some:
            # The last bucket, or the first gather, has nothing to hide behind.
            alone = sum(sends) / sum(one.calls for one in some)
            out = max(alone, sum(sends) - windows[kind])
            slowed = machine.reach.contention * (sum(sends) - out) if kind == "step" else 0.0
            exposed += out + slowed
            hidden += sum(sends) - out - slowed
    bubble = busy * work.idle / (1 - work.idle)
    return {
        "products_s": products,
        "memory_s": memory,
        "launch_s": launches,
        "bubble_s": bubble,
        "exposed_s": exposed,
        "hidden_s": hidden,
        "step_s": busy + bubble + exposed,
    }


def best_interval(save_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves that lose least time (Daly 2006, equation 37)."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def lost_share(save_s: float, interval_s: float, recovery: float, mtbf_s: float) -> float:
    """Share of time that saves and failures take, of 1."""
    return min(1.0, save_s / (interval_s + save_s) + (interval_s / 2 + save_s + recovery) / mtbf_s)


def predict(works: Sequence[Work], machine: Hardware) -> Prediction:
    """What a step takes whose ranks, or those of them that differ, do this work: the slowest rank counts."""
    parts = max((of_rank(work, machine) for work in works), key=lambda one: one["step_s"])
    work = works[0]
    machines = math.ceil(work.world_size / machine.local_size)
    save = work.state_bytes / (machine.storage_bandwidth * machines)
    mtbf = machine.mtbf_hours * HOUR_S / work.world_size
    interval = best_interval(save, mtbf)
    waits = parts["bubble_s"] + parts["exposed_s"]
    return Prediction(
        **parts,
        mfu=work.model_flops / (parts["step_s"] * machine.peak_16bit * work.world_size),
        efficiency=1 - waits / parts["step_s"],
        peak_bytes=max(one.peak_bytes for one in works),
        save_s=save,
        interval_s=interval,
        lost=lost_share(save, interval, recovery_s() + save, mtbf),
    )
