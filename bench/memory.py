#!/usr/bin/env python3
"""What a process of llama.cpp holds with each cache: peak anonymous memory beside the plug-in's own count.

usage: bench/memory.py MODEL [RECIPE...]   (KVANT_LLAMA_DIR: folder of llama.cpp's programs; KVANT_PLUGIN: the plug-in)
Fills 8192 cells with llama-bench, first with the host's own f16 cache, then with each recipe (f16 and kivi by default).
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
HOST = pathlib.Path(os.environ.get("KVANT_LLAMA_DIR", next(ROOT.glob("build/venv/lib/python3*/site-packages"), "")))
PLUGIN = os.environ.get("KVANT_PLUGIN", str(ROOT / "build/release/plugin/llama.cpp/libkvant-llama.so"))
DEPTH = ["-p", "0", "-n", "64", "-d", "8128", "-ub", "128", "-fa", "1", "-r", "1", "--no-warmup"]


def anonymous_kib(pid):
    """Memory that no file backs, as the kernel counts it; 0 once the process is gone."""
    try:
        text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return int(re.search(r"^Anonymous:\s+(\d+)", text, re.MULTILINE)[1]) if text else 0


def measure(model, recipe, status):
    environment = dict(os.environ, LD_LIBRARY_PATH=str(HOST / "lib"))
    if recipe:
        environment.update(GGML_BACKEND_PATH=PLUGIN, LLAMA_ARG_DEVICE="KVANT0", KVANT_RECIPE=recipe, KVANT_STATUS=status)
    program = subprocess.Popen([HOST / "bin/llama-bench", "-m", model, *DEPTH], env=environment,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    peak = 0
    while program.poll() is None:
        peak = max(peak, anonymous_kib(program.pid))
        time.sleep(0.1)
    if program.returncode != 0:
        sys.exit(f"llama-bench ended with {program.returncode} for {recipe or 'stock f16'}")
    return peak


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print(f"{'cache':<24} {'process KiB':>12} {'status KiB':>12} {'workspace KiB':>14} {'bits':>7}")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "status.json"
        print(f"{'stock f16':<24} {measure(sys.argv[1], None, ''):>12}", flush=True)
        for recipe in sys.argv[2:] or ["f16", "kivi"]:
            peak = measure(sys.argv[1], recipe, str(path))
            held = json.loads(path.read_text())
            print(f"{recipe:<24} {peak:>12} {held['kv_bytes_peak'] // 1024:>12} {held['workspace_bytes'] // 1024:>14} "
                  f"{held['bits_per_value']:>7.3f}", flush=True)  # fmt: skip
            path.unlink()


if __name__ == "__main__":
    main()
