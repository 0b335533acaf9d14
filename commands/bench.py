"""Measure cold starts from launch to first token, and compare each start mode with plain vLLM.

Each round starts every mode once. The exit code is 1 if tokens differ, a mode fell back to a slower mode, a server died, or
--baseline shows a regression. The files of --export are updated after each run. Arguments after -- go to vLLM in all modes.
"""

from typing import Any

from coldstart.commands._export import Export, ExportTargets, write_report
from coldstart.commands._options import Common, Model
from coldstart.commands._options import command as declare

from coldstart.bench import starts
from coldstart.bench.benchmark import run
from coldstart.bench.run_order import BenchOptions
from coldstart.errors import CommandFailedError


@declare(takes_vllm_args=True, settings=BenchOptions)
def command(common: Common, settings: dict[str, Any], model: Model, export: Export = None) -> None:
    """Run the benchmark, write the exports, print the report, and fail if a check failed."""
    exports = ExportTargets.parse(export)
    request = BenchOptions(model, common.vllm_args, offline=common.offline, cache=common.cache, **settings)
    with common.out.show_phase("measure cold starts") as step:
        document = run(request, step, lambda document: exports.write_partial(starts.build_report(document)))
    files = write_report(common.out, exports, starts.build_report(document))
    if document["failures"]:
        raise CommandFailedError("; ".join(document["failures"]), hint="run `coldstart doctor`")
    where = ", ".join(files) or None
    then = "coldstart bench MODEL --export json=baseline.json" if not files else None
    common.out.print_success(f"Measured {document['model']}", where=where, then=then)
