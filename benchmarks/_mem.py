"""memory part prototype"""
import ctypes, json, re, sys, tempfile, time
from pathlib import Path
from typing import Any
from tests.harness import probes, runner
from tools import about
from tools.plan import hardware
from tools.plan.count import Case, count

HERE = hardware.Hardware("cpu", 1e12, 1e11, 16, 1e10, 4, 1e9, 1e9)
STEP = 3

def resident(word):
    return int(re.search(rf"{word}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def peak(path: str, argv: list[str], file: str) -> None:
    """In a rank: the most bytes that it holds in a step."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD
    libc.mallopt(-1, 2**16)  # M_TRIM_THRESHOLD
    def before(step):
        if step == STEP:
            libc.malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        elif step == STEP + 1:
            Path(file).write_text(json.dumps(resident("VmHWM")))
    probes.run_until(path, argv, STEP, before, Path(file))

GPT = ("--seq-len","256","--num-layers","6","--num-heads","8","--width","512")
TINY = ("--seq-len","8","--num-layers","{n}","--num-heads","2","--width","16")
def cases(r, size):
    if about.workload(r) == "gpt":
        more = ()
        if about.has_flag(r,"--tp"): more=("--tp", str(size))
        if about.has_flag(r,"--pp"): more=("--pp", str(size), "--micro-batch-size","4")
        big = (*GPT, "--global-batch-size", str((8 if "--pp" not in more else 8)*(1 if more else size)), *more)
        small = ("--seq-len","8","--num-layers","8","--num-heads","8","--width","32","--global-batch-size", str(8*(1 if more else size)), *more)
    else:
        big = ("--model","resnet50","--image-size","64","--global-batch-size",str(32*size))
        small = ("--model","resnet18","--image-size","32","--global-batch-size",str(2*size))
    return big, small

if __name__ == "__main__":
    only = sys.argv[1:] 
    for r in about.RECIPES:
        if about.workload(r) not in ("gpt","resnet") or (only and r not in only): continue
        for size in (1,2,4):
            if size > 1 and about.is_single(r): continue
            if size==1 and r=="pipeline_gpt": continue
            real, said = [], []
            t=time.time()
            for flags in cases(r,size):
                with tempfile.TemporaryDirectory() as f:
                    real.append(max(probes.in_ranks(peak, r, size, list(flags), Path(f)/"x")))
                works = count(Case(about.ROOT/"recipes"/r, size, ("--dtype","float32",*flags)), HERE)
                said.append(max(w.peak_bytes for w in works))
            a, b = real[0]-real[1], said[0]-said[1]
            print(f"{r:18} {size} real {real[0]/2**20:.0f}-{real[1]/2**20:.0f}={a/2**20:.0f} said {said[0]/2**20:.0f}-{said[1]/2**20:.0f}={b/2**20:.0f} {b/a-1:+.1%} {time.time()-t:.0f}s", flush=True)
