#!/bin/sh
# Starts a pilot on a node that may have no Python. The files that this script needs are in the folder of this script.
# Any Python 3.11 or later can run start.pyz. If the node has no such Python, base.tar.gz contains an interpreter.
here=$(dirname -- "$0")
named=$(cat "$here/python" 2>/dev/null)

is_new() { "$1" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

for python in "$named" python3 /usr/bin/python3 /usr/local/bin/python3; do
    if [ -n "$python" ] && is_new "$python"; then
        exec "$python" -I "$here/start.pyz" "$here" "$@"
    fi
done

if [ ! -r "$here/base.tar.gz" ]; then
    echo "stoker: $(uname -n) has no ${named:-python3} of version 3.11 or later;" \
        "leave [environment] python empty in the site file, so that the job brings an interpreter" >&2
    exit 1
fi
begin=$(mktemp -d "${TMPDIR:-/tmp}/stoker-begin.XXXXXX") || exit 1
if ! tar -xzf "$here/base.tar.gz" -C "$begin"; then
    echo "stoker: the interpreter could not be unpacked in $begin on $(uname -n); is its disk full?" >&2
    rm -rf "$begin"
    exit 1
fi
python=$begin/base/bin/python3
if ! "$python" -I -c 'import hashlib, socket, zlib' >/dev/null 2>&1; then
    # base.tar.gz also contains the shared libraries that this node lacks
    exec env LD_LIBRARY_PATH="$begin/base/lib/bundled" "$python" -I "$here/start.pyz" "$here" --begun "$begin" "$@"
fi
exec "$python" -I "$here/start.pyz" "$here" --begun "$begin" "$@"
