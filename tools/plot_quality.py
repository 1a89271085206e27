#!/usr/bin/env python3
"""Plots KL divergence against bits per value from `kvant compare --json`, one curve per method, stock types as points.

Rows of 16 bits are left out, but for `f16`, kvant's control, which is a line: what any change of arithmetic costs. Rows
of fewer chunks of text than most are drawn hollow. A row's "label" stands for its recipe where that is long.

usage: tools/plot_quality.py RESULTS.json -o PICTURE.svg [--title TEXT]   (.svg or .png; needs matplotlib)
"""

import argparse
import json
import pathlib
import statistics

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)


def family(row):
    """The curve that a row belongs to: its method, or "stock"; presets are points of their method."""
    text = row["recipe_full"]
    return "stock llama.cpp" if text.startswith("stock:") else text.split(":")[0]


def plot(rows, title):
    figure, axes = plt.subplots(figsize=(10, 7), layout="constrained")
    families = {}
    chunks = statistics.median_high(row["run"]["chunks"] for row in rows)
    for row in rows:
        if row["recipe"] == "f16":
            axes.axhline(row["kld"], color="gray", linestyle="--", label="f16 through kvant: any change of arithmetic")
        elif row["kld"] > 0 and row["bits_asymptotic"] < 16:
            families.setdefault(family(row), []).append(row)
    for name, members in sorted(families.items()):
        # The curve goes through the best row of each number of bits.
        best = {}
        for row in sorted(members, key=lambda row: (row["bits_asymptotic"], row["kld"])):
            best.setdefault(row["bits_asymptotic"], row["kld"])
        line = "none" if name == "stock llama.cpp" else "-"
        (curve,) = axes.plot(best.keys(), best.values(), marker="o", linestyle=line, label=name)
        for row in members:
            fill = "white" if row["run"]["chunks"] < chunks else curve.get_color()
            axes.plot(row["bits_asymptotic"], row["kld"], marker="o", color=curve.get_color(), markerfacecolor=fill)
            label = row.get("label", row["recipe"].removeprefix("stock:"))
            axes.annotate(label, (row["bits_asymptotic"], row["kld"]), fontsize=7, xytext=(4, 4),
                          textcoords="offset points")
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
