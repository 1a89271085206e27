#!/usr/bin/env python3
"""Plots KL divergence against bits per value from `kvant compare --json`, one curve per method, stock types as points.

usage: tools/plot_quality.py RESULTS.json -o PICTURE.svg [--title TEXT]   (.svg or .png; needs matplotlib)
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)


def family(row):
    """The curve that a row belongs to: its method, or "stock"; presets are points of their method."""
    text = row["recipe_full"]
    return "stock llama.cpp" if text.startswith("stock:") else text.split(":")[0]


def plot(rows, title):
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    families = {}
    for row in rows:
        if row["kld"] > 0:
            families.setdefault(family(row), []).append(row)
    for name, members in sorted(families.items()):
        members.sort(key=lambda row: row["bits_asymptotic"])
        line = "none" if name == "stock llama.cpp" else "-"
        bits = [row["bits_asymptotic"] for row in members]
        axes.plot(bits, [row["kld"] for row in members], marker="o", linestyle=line, label=name)
        for row in members:
            axes.annotate(row["recipe"].removeprefix("stock:"), (row["bits_asymptotic"], row["kld"]), fontsize=7,
                          xytext=(4, 4), textcoords="offset points")
    axes.set_yscale("log")
    axes.set_xlabel("bits per value of sealed pages, everything counted")
    axes.set_ylabel("mean KL divergence against an f16 cache")
    axes.set_title(title)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True)
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()
    rows = json.loads(arguments.results.read_text())
    # A fixed salt and no date: the same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "kvant"
    metadata = {"Date": None} if arguments.output.suffix == ".svg" else None
    plot(rows, arguments.title).savefig(arguments.output, metadata=metadata)


if __name__ == "__main__":
    main()
