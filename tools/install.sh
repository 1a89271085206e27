#!/usr/bin/env bash
# make install PREFIX=...: the library, the plug-in and the command.
source "$(dirname "$0")/common.sh"

prefix=${1:-/usr/local}
"$ROOT/tools/setup.sh" packages
"$ROOT/tools/build.sh" release
long_step "install to $prefix" install.log cmake --install "$BUILD/release" --prefix "$prefix"
