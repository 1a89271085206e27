"""Checks that each layer includes only layers below it, and that the public headers need nothing but themselves.

base < tiles < exact < methods < cache < cuda < hosts (plugin, cli, python). A method folder sees the other methods only through
src/methods itself. usage: check_layers.py [ROOT]
"""

import pathlib
import re
import sys

LAYERS = ["base", "tiles", "exact", "methods", "cache", "cuda"]
HOSTS = ["plugin", "cli", "python"]
SUFFIXES = {".hpp", ".cpp", ".h", ".inl", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.MULTILINE)
# Headers that only code for one instruction set or one accelerator may see.
FORBIDDEN_PUBLIC = re.compile(r"(intrin\.h|arm_neon\.h|^hwy/|^cuda|^omp\.h)")


def includes(path: pathlib.Path) -> list[str]:
    return [name for _, name in INCLUDE.findall(path.read_text(encoding="utf-8"))]


def sources(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file())


def layer_errors(root: pathlib.Path) -> list[str]:
    errors = []
    for level, layer in enumerate(LAYERS):
        folder = root / "src" / layer
        for path in sources(folder):
            own_method = path.relative_to(folder).parts[0] if layer == "methods" else ""
            for name in includes(path):
                first, *rest = name.split("/")
                if first in LAYERS[level + 1 :] or first in HOSTS:
                    errors.append(f"{path}: '{layer}' includes '{name}' of a layer above")
                sibling = layer == "methods" and first == "methods" and len(rest) > 1 and rest[0] != own_method
                if sibling and path.parent != folder:
                    errors.append(f"{path}: a method includes '{name}' of another method")
    return errors


def host_errors(root: pathlib.Path) -> list[str]:
    """Hosts use the public headers and never each other."""
    errors = []
    for host in HOSTS:
        for path in sources(root / host):
            for name in includes(path):
                first = name.split("/")[0]
                if first in HOSTS and first != host:
                    errors.append(f"{path}: host '{host}' includes '{name}' of another host")
                if first in ("tiles", "exact", "methods", "src"):
                    errors.append(f"{path}: host '{host}' includes '{name}' past the public headers")
    return errors


def public_errors(root: pathlib.Path) -> list[str]:
    errors = []
    for path in sources(root / "include"):
        for name in includes(path):
            first = name.split("/")[0]
            if FORBIDDEN_PUBLIC.search(name):
                errors.append(f"{path}: public header includes '{name}'")
            if first in LAYERS or first == "src" or name.startswith("."):
                errors.append(f"{path}: public header includes '{name}' of src/")
    return errors


def main() -> int:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    errors = layer_errors(root) + host_errors(root) + public_errors(root)
    for error in errors:
        print(error.replace(f"{root}/", ""), file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
