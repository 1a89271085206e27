"""Prints the figures of kvant_bench_gpu beside torch's best fp16 back end. usage: table.py KVANT.jsonl SDPA.jsonl"""

import json
import pathlib
import sys


TABLE = ("2-bit", "kitty 25 %", "small", "balanced", "near-lossless", "4-bit", "3-bit", "K4 V2", "kvquant 3", "kvquant 2", "zipcache")


def lines(path: str) -> list[dict]:
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines() if line.startswith("{")]


def main() -> None:
    figures = lines(sys.argv[1])
    fp16: dict[tuple[int, int, int], float] = {}
    for line in lines(sys.argv[2]):
        if "backend" in line and "us" in line:
            key = (line["batch"], line["tokens"], line.get("rows", 1))
            fp16[key] = min(fp16.get(key, line["us"]), line["us"])
    for line in figures:
        if "read GB/s" in line:
            print(f"{line['device']}, read bandwidth {line['read GB/s']:.0f} GB/s\n")
    print("| case | batch x tokens | us | us, overlapped | GB/s | % of read | error | fp16 us | x fp16 (plain / overlapped) |")
    print("|---|---|---|---|---|---|---|---|---|")
    overlapped = {(f["case"], f["batch"], f["tokens"]): f for f in figures if f.get("kind") == "overlap"}
    for f in figures:
        if f.get("kind") != "plain":
            continue
        best = overlapped[f["case"], f["batch"], f["tokens"]]
        # torch was measured with the table's shape: 4 query heads per KV head, D = 128, equal lengths
        base = fp16.get((f["batch"], f["tokens"], 1)) if f["case"] in TABLE else None
        ratio = f"{base / f['us']:.2f} / {base / best['us']:.2f}" if base else ""
        print(
            f"| {f['case']} | {f['batch']} x {f['tokens']} | {f['us']:.1f} | {best['us']:.1f} | {best['GB/s']:.0f} |"
            f" {best['percent']:.1f} | {f['error']:.1e} | {base or ''} | {ratio} |"
        )
    print("\n| prefill | tokens | rows | us | TFLOP/s | error | fp16 us | x fp16 |\n|---|---|---|---|---|---|---|---|")
    for f in figures:
        if f.get("kind") != "prefill":
            continue
        base = fp16.get((f["batch"], f["tokens"], f["rows"]))
        ratio = f"{base / f['us']:.2f}" if base else ""
        print(
            f"| {f['case']} | {f['tokens']} | {f['rows']} | {f['us']:.1f} | {f['TFLOP/s']:.0f} | {f['error']:.1e} |"
            f" {base or ''} | {ratio} |"
        )
    for f in figures:
        if f.get("case") == "seal":
            print(f"seal {f['recipe']}: {f['head pages']} pages of a head in {f['us']:.1f} us")


if __name__ == "__main__":
    main()
