"""Prints the project's own files of a compilation database, each once."""

import json
import pathlib
import sys

root = pathlib.Path(__file__).resolve().parent.parent
with open(sys.argv[1], encoding="utf-8") as database:
    files = {pathlib.Path(entry["directory"], entry["file"]).resolve() for entry in json.load(database)}
for file in sorted(files):
    if file.is_relative_to(root) and not file.is_relative_to(root / "build"):
        print(file)
