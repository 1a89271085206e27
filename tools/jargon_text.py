"""Prints the Jargon File of Debian's dict-jargon as plain paragraphs: indentation and cross-reference braces removed."""

import gzip
import re
import sys


def paragraphs(text: str) -> list[str]:
    joined = (" ".join(block.split()) for block in re.split(r"\n\s*\n", text))
    # Headwords and pronunciations are short; running prose is what a language model should be measured on.
    return [re.sub(r"[{}]", "", block) for block in joined if len(block) > 120]


def main() -> None:
    with gzip.open(sys.argv[1], "rt", encoding="utf-8", errors="replace") as file:
        text = file.read()
    # The file begins with its own licence and index.
    print("\n".join(paragraphs(text)[20:]))


if __name__ == "__main__":
    main()
