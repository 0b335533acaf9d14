#!/bin/sh
# Get a Chromium for the tests of pages, without installing anything: prints the path of the Python that has it.
#
# It is Qt's WebEngine from PyPI, in an environment of its own below .cache/chromium, with axe-core beside it.
# Exit 1, with the reason, where this fails: the tests of pages are then skipped.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
there=$root/.cache/chromium
lock=$root/requirements/browser.lock

fail() {
    echo "fetch-chromium: $*" >&2
    exit 1
}

if cmp -s "$lock" "$there/browser.lock" && [ -x "$there/bin/python" ]; then
    echo "$there/bin/python"
    exit 0
fi

rm -rf "$there"
trap 'rm -rf "$there"; exit 130' INT TERM
"${PYTHON:-python3}" -m venv "$there" || fail "no environment can be made in $there"
"$there/bin/python" -m pip install --quiet --no-deps --require-hashes -r "$lock" >&2 ||
    { rm -rf "$there"; fail "Qt WebEngine cannot be installed"; }
for library in "$there"/lib/python3*/site-packages/PyQt6/Qt6/lib/libQt6WebEngineCore.so.6; do
    missing=$(ldd "$library" | sed -n 's/ => not found//p' | tr -d '\t' | tr '\n' ' ')
    [ -z "$missing" ] || { rm -rf "$there"; fail "this system lacks $missing"; }
done
cp "$lock" "$there/browser.lock"
echo "$there/bin/python"
