#!/usr/bin/env bash
# Writes the Jargon File 4.4.7 (public domain) as plain paragraphs to $1, from Debian's package dict-jargon, which is
# unpacked but not installed.
source "$(dirname "$0")/common.sh"

target=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
cd "$work"
if ! apt-get download dict-jargon; then
  ((EUID == 0)) && apt-get update
  apt-get download dict-jargon
fi
dpkg-deb -x dict-jargon_*.deb unpacked
python3 "$ROOT/tools/jargon_text.py" unpacked/usr/share/dictd/jargon.dict.dz >"$target.part"
mv "$target.part" "$target"
