#!/usr/bin/env bash
# Compiles every public header alone: it must include what it uses, without warnings, with both compilers.
source "$(dirname "$0")/common.sh"

cd "$ROOT"
checked=0
for compiler in g++ clang++; do
  command -v "$compiler" >/dev/null || die "$compiler was not found (tools/setup.sh packages installs it)"
  for header in include/kvant/*; do
    [[ $header == *.h ]] && language=c || language=c++
    [[ $language == c ]] && standard=c11 || standard=c++20
    "$compiler" -x "$language" -std=$standard -Wall -Wextra -Werror -fsyntax-only -Iinclude \
      -include "${header#include/}" /dev/null || die "$header does not compile alone with $compiler"
    checked=$((checked + 1))
  done
done
printf '   %d compilations\n' "$checked"
