#!/bin/sh
# Get a CRIU that knows current kernels, without installing anything: prints the path of a program to run.
#
#   COLDSTART_CRIU=$(tests/tools/fetch-criu.sh) coldstart materialize MODEL --snapshot
#
# One in PATH that is recent enough is taken. Otherwise Debian unstable's package and the libraries that it needs are
# unpacked below .cache/criu and started through their own dynamic loader, whatever libc the system has.
# COLDSTART_DEBIAN_MIRROR names a mirror where apt's own sources have none. Exit 1, with the reason, where this fails.
set -eu

least=4.2
here=$(cd "$(dirname "$0")/../.." && pwd)/.cache/criu
program=$here/criu

fail() {
    echo "fetch-criu: $*" >&2
    exit 1
}

version_of() { "$1" --version 2>/dev/null | sed -n 's/^Version: *//p'; }

recent() { [ -n "$1" ] && [ "$(printf '%s\n' "$least" "$1" | sort -V | head -n 1)" = "$least" ]; }

done_already() { [ -x "$program" ] && recent "$(version_of "$program")"; }

if done_already; then
    echo "$program"
    exit 0
fi

work=$here.$$
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
rm -rf "$here"
mkdir -p "$work"

publish() {
    chmod 755 "$work/criu"
    recent "$(version_of "$work/criu")" || fail "what was fetched does not run: $("$work/criu" --version 2>&1 | tail -n 1)"
    mv "$work" "$here"
    echo "fetch-criu: CRIU $(version_of "$program")" >&2
    echo "$program"
    exit 0
}

installed=$(command -v criu || true)
if [ -n "$installed" ] && recent "$(version_of "$installed")"; then
    printf '#!/bin/sh\nexec "%s" "$@"\n' "$installed" >"$work/criu"
    publish
fi

for tool in apt-get apt-cache dpkg-deb; do
    command -v "$tool" >/dev/null || fail "there is no $tool here: install CRIU $least or newer, and put it in PATH"
done

mirror=${COLDSTART_DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' |
    grep -m 1 '/debian/\?$' || true)}
[ -n "$mirror" ] || fail "apt knows no mirror of Debian: name one in COLDSTART_DEBIAN_MIRROR"

# Lists, cache and status of our own: apt's view of the system is neither read nor changed.
apt=$work/apt
mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$work/packages" "$work/root"
for keyring in /usr/share/keyrings/debian-archive-keyring.gpg /usr/share/keyrings/debian-archive-keyring.pgp; do
    [ ! -e "$keyring" ] || signed="[signed-by=$keyring]"
done
echo "deb ${signed:-} $mirror unstable main" >"$apt/sources.list"
set -- -q -o Dir::Etc::SourceList="$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
    -o Dir::State::Lists="$apt/lists" -o Dir::State::status=/dev/null -o Dir::Cache="$apt/cache" \
    -o APT::Sandbox::User=root -o APT::Update::Error-Mode=any -o Acquire::Languages=none \
    -o Acquire::Retries=2 -o Acquire::http::Timeout=30
exec 3>"$work/log"
said() { tail -n 3 "$work/log" | tr '\n' ' '; }

echo "fetch-criu: looking up Debian's package" >&2
apt-get "$@" update >&3 2>&3 || fail "apt-get update was refused: $(said)"
needed=$(apt-cache "$@" depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
    --no-enhances criu 2>&3 | grep '^[a-z0-9]' | sort -u)
[ -n "$needed" ] || fail "the mirror has no package called criu for $(dpkg --print-architecture)"

echo "fetch-criu: fetching $(echo "$needed" | wc -l) packages" >&2
# shellcheck disable=SC2086 # one word per package
(cd "$work/packages" && apt-get "$@" download $needed >&3 2>&3) || fail "a package cannot be fetched: $(said)"
for package in "$work"/packages/*.deb; do
    dpkg-deb --extract "$package" "$work/root" 2>&3 || fail "$(basename "$package") cannot be unpacked: $(said)"
done
rm -rf "$apt" "$work/packages" "$work/root/usr/share"

loader=$(cd "$work" && find root/usr/lib root/lib -name 'ld*.so.[0-9]' -type f 2>/dev/null | head -n 1)
binary=$(cd "$work" && find root -name criu -type f -path '*/sbin/*' | head -n 1)
[ -n "$loader" ] && [ -n "$binary" ] || fail "the packages hold no loader or no criu"
cat >"$work/criu" <<WRAPPER
#!/bin/sh
here=\$(cd "\$(dirname "\$0")" && pwd)
exec "\$here/$loader" --library-path "\$here/$(dirname "$loader")" "\$here/$binary" "\$@"
WRAPPER
publish
