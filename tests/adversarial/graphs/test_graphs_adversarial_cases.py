"""All adversarial cases: the test of each, and below it the companion test in which the naive method fails.

address reuse (Figure 6)          | test_a_reused_address_is_the_later_allocation
                                  | test_naive_first_match_is_the_freed_allocation
address reuse, whole process      | test_the_allocation_that_was_live_is_found_elsewhere
                                  | test_naive_first_allocation_with_the_address_is_another_tensor_elsewhere
constant equal to a live address  | test_a_constant_equal_to_a_live_address_stays_a_constant
                                  | test_naive_one_capture_with_intervals_corrupts_that_constant
stale padding in structs          | test_stale_padding_with_an_address_prefix_is_noise
                                  | test_naive_prefix_takes_stale_padding_for_a_pointer
unaligned pointers                | test_interior_and_unaligned_pointers
                                  | test_naive_aligned_windows_miss_the_unaligned_pointer
interior pointers                 | test_interior_and_unaligned_pointers
                                  | test_naive_equality_with_a_base_misses_interior_pointers
pointers in packed structs        | test_pointers_in_packed_structs
                                  | test_naive_four_byte_stride_misses_packed_pointers
one past the end                  | test_one_past_the_end
                                  | test_naive_half_open_intervals_miss_one_past_the_end
end of one, start of another      | test_the_end_of_one_is_the_start_of_another_in_both_captures
                                  | test_naive_first_reading_is_wrong_where_they_differ
a word that moves between regions | test_a_word_that_points_elsewhere_each_time_is_a_conflict
                                  | test_naive_one_capture_relocates_a_word_that_is_no_one_pointer
memory the framework carves up    | test_a_framework_segment_is_never_adopted_as_library_memory
                                  | test_naive_ranges_of_the_driver_alone_adopt_it
two binaries, one kernel name     | test_two_binaries_with_one_kernel_name_are_two_kernels
                                  | test_naive_a_name_alone_picks_the_wrong_binary
the same, modules not watched     | test_without_watching_modules_twins_are_not_guessed
                                  | test_naive_a_name_alone_picks_the_wrong_binary
kernels hidden from dlsym         | test_hidden_kernels_come_from_modules_that_the_first_layer_loads
                                  | test_naive_dlsym_cannot_see_hidden_kernels
binaries with mutable globals     | test_a_binary_with_mutable_globals_is_never_loaded_twice
                                  | test_naive_loading_again_makes_a_second_copy
function attributes               | test_function_attributes_are_set_again
                                  | test_naive_without_them_a_big_shared_buffer_is_an_error
split-K semaphores                | test_split_k_semaphores_are_among_the_contents
                                  | test_naive_without_contents_the_semaphore_is_never_ready
pointers inside device buffers    | test_the_bundle_itself_is_right
                                  | test_naive_verbatim_contents_hold_addresses_of_another_process
tensor maps                       | test_tensor_maps_are_moved_by_the_driver
                                  | test_naive_plain_words_leave_tensor_maps_where_they_were
edge data                         | test_graphs_are_not_chains_and_their_edge_data_survive
                                  | test_naive_plain_edges_lose_the_programmatic_ones
non-linear graphs                 | test_graphs_are_not_chains_and_their_edge_data_survive
                                  | test_naive_chains_lose_the_parallel_branches
non-linear graphs, order          | test_the_bundle_itself_is_right
                                  | test_naive_without_edges_a_parallel_order_is_wrong
base collision                    | test_two_layouts_that_do_not_differ_are_refused
                                  | test_naive_difference_calls_that_pointer_a_constant
truncated or altered bundles      | test_every_altered_byte_of_every_small_file_is_refused
                                  | test_naive_loading_without_the_seal_runs_altered_parameters
altered and sealed again          | test_the_canary_catches_altered_tables_that_were_sealed_again
                                  | test_naive_trust_in_sealed_tables_gives_wrong_outputs
a wrong relocation                | test_a_relocation_shifted_by_256_bytes_does_not_pass_the_gate
                                  | test_naive_publishing_without_the_gate_gives_wrong_outputs
refusal: unsupported nodes        | test_unsupported_nodes_are_refused_by_name
                                  | test_naive_dropping_an_unsupported_node_drops_its_order
refusal: copies from the host     | test_copies_from_host_memory_are_refused
                                  | test_naive_replaying_a_pinned_pointer_elsewhere_faults
refusal: pinned host pointers     | test_pinned_host_pointers_are_refused
                                  | test_naive_replaying_a_pinned_pointer_elsewhere_faults
refusal: collectives, ranks       | test_collectives_are_refused
                                  | test_naive_adopted_memory_of_a_peer_is_a_private_copy
refusal: random numbers           | test_random_number_graphs_are_refused_by_the_framework
                                  | test_naive_replay_of_a_captured_offset_repeats_itself
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.graphs_tools import SMALL, is_wrong, seal

from benchmarks.gpu.compare import single
from coldstart.graphs import capture, table_files, windows
from coldstart.graphs.api import AllocationEvent, NodeKind
from coldstart.graphs.errors import AlteredTableError
from coldstart.graphs.kernels import Ladder
from coldstart.graphs.tables import EDGE, Kernel, Tables
from coldstart.graphs.trace import live_allocation, match_live, pack
from tests.support.graphs.driver import Library, Node, SimDriver
from tests.support.graphs.images import cubin
from tests.support.graphs.kernels import ROUTINES
from tests.support.graphs.model import SimModel, libraries
from tests.support.graphs.random_graphs import Field, Program, place, snapshot

HERE = Path(__file__).parent
LINES = [line.split("|") for line in str(__doc__).splitlines() if "| test_" in line]
ROWS = [
    (case.strip(), test.strip(), naive.strip())
    for (case, test), (_, naive) in zip(LINES[::2], LINES[1::2], strict=True)
]


@pytest.mark.parametrize(("case", "test", "companion"), ROWS, ids=[row[0] for row in ROWS])
def test_the_table_is_of_tests_that_exist(case: str, test: str, companion: str) -> None:
    files = [
        *HERE.glob("*.py"),
        *(HERE.parents[1] / "unit" / "graphs").glob("*.py"),
        *(HERE.parents[1] / "unit/vllm/graphs").glob("*.py"),
    ]
    names = {
        name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert {test, companion} <= names and companion.startswith("test_naive_"), case


def test_every_companion_is_in_the_table() -> None:
    found = {
        n
        for f in HERE.glob("*.py")
        for n in re.findall(r"^def (test_naive_\w+)", f.read_text(), re.MULTILINE)
    }
    assert found == {row[2] for row in ROWS}


# --- words ---


def _one(field: Field, size: int, sizes: tuple[int, ...] = (4096, 8192)) -> Program:
    program = Program(["param:w", "kv:0"], list(sizes))
    program.kernels, program.nodes = [Kernel("k", None, ((0, size),))], [(0, [field])]
    return program


def test_naive_equality_with_a_base_misses_interior_pointers() -> None:
    program = _one(Field("pointer", 0, 8, 1, 4099), 8)
    placed = place(program, 1)
    word = windows.values(snapshot(program, placed).tables.payload, np.array([0]))
    assert not np.isin(word, placed.bases).any()


def test_naive_four_byte_stride_misses_packed_pointers() -> None:
    program = _one(Field("pointer", 3, 8, 1, 32), 11)
    placed = place(program, 1)
    shot = snapshot(program, placed)
    found = windows.values(shot.tables.payload, windows.places(shot.tables))
    assert placed.bases[1] + 32 not in found.tolist()
    assert (
        placed.bases[1] + 32 in windows.values(shot.tables.payload, windows.places(shot.tables, 1)).tolist()
    )


def test_naive_one_capture_relocates_a_word_that_is_no_one_pointer() -> None:
    program = _one(Field("pointer", 0, 8, 0, 8), 8)
    assert list(single(snapshot(program, place(program, 1)))) == [0]
    program.nodes = [(0, [Field("pointer", 0, 8, 1, 16)])]
    assert list(single(snapshot(program, place(program, 2)))) == [0]


# --- address reuse in whole processes ---


def _traces() -> tuple[SimModel, SimModel, list[AllocationEvent], int]:
    """Return a process whose table reused a freed address, one whose table did not, and the table's ordinal."""
    reusing, other = SimModel(SMALL, 1, reuse=1.0), SimModel(SMALL, 2, reuse=0.0)
    (match, _), *_ = match_live(pack(reusing.trace()), [reusing.rope_table]).values()
    assert match is not None
    return reusing, other, [e for e in other.trace() if e.kind == "alloc"], match[0]


def test_the_allocation_that_was_live_is_found_elsewhere() -> None:
    _, other, _, ordinal = _traces()
    found = live_allocation(other.trace(), ordinal)
    assert found is not None and found[0] == other.rope_table


def test_naive_first_allocation_with_the_address_is_another_tensor_elsewhere() -> None:
    reusing, _, allocated, ordinal = _traces()
    mine = [e for e in reusing.trace() if e.kind == "alloc"]
    naive = next(i for i, e in enumerate(mine) if e.address <= reusing.rope_table < e.address + e.size)
    assert naive < ordinal and allocated[naive].address != allocated[ordinal].address


# --- bundles as a naive implementation would write them ---


def test_naive_loading_without_the_seal_runs_altered_parameters(
    bundle_directory: Path, tmp_path: Path
) -> None:
    tables = table_files.load(bundle_directory)
    node = tables.nodes[int(tables.graphs["node"][tables.keys.index("decode:256")])]
    payload = np.array(tables.payload)
    payload[int(node["payload"]) + 24] ^= 1  # the rows that the first kernel computes
    altered = tmp_path / "altered"
    altered.mkdir()
    for path in bundle_directory.glob("*.*"):
        (altered / path.name).write_bytes(path.read_bytes())
    np.save(altered / "payload.npy", payload)
    with pytest.raises(AlteredTableError):
        table_files.load(altered)
    naive = table_files.load(altered, verify=False)
    assert is_wrong(seal(bundle_directory, tmp_path / "naive", naive), "decode:256")


def _shifted(bundle_directory: Path, symbol: str, key: str) -> Tables:
    tables = table_files.load(bundle_directory)
    rows, graph = tables.relocations.copy(), tables.graphs[tables.keys.index(key)]
    mine = np.arange(graph["relocation"], graph["relocation"] + graph["relocations"])
    wanted = [i for i, r in enumerate(tables.regions) if r.symbol == symbol]
    rows["offset"][mine[np.isin(rows["region"][mine], wanted)]] += 256
    return replace(tables, relocations=rows)


def test_naive_publishing_without_the_gate_gives_wrong_outputs(
    bundle_directory: Path, tmp_path: Path
) -> None:
    assert is_wrong(
        seal(bundle_directory, tmp_path / "naive", _shifted(bundle_directory, "kv:0", "decode:64")),
        "decode:64",
    )


def test_naive_trust_in_sealed_tables_gives_wrong_outputs(bundle_directory: Path, tmp_path: Path) -> None:
    assert is_wrong(
        seal(bundle_directory, tmp_path / "naive", _shifted(bundle_directory, "param:embed", "decode:1")),
        "decode:1",
    )


def test_naive_chains_lose_the_parallel_branches(bundle_directory: Path, tmp_path: Path) -> None:
    """The outputs are correct, but kernels cannot run concurrently and no launch is programmatic."""
    tables = table_files.load(bundle_directory)
    counts = tables.graphs["nodes"].astype(int)
    chains = [[(i, i + 1, 0, 0, 0, 0) for i in range(n - 1)] for n in counts]
    graphs = tables.graphs.copy()
    graphs["edges"] = counts - 1
    graphs["edge"] = np.concatenate([[0], np.cumsum(counts - 1)[:-1]])
    edges = np.array([row for chain in chains for row in chain], EDGE)
    naive = seal(bundle_directory, tmp_path / "naive", replace(tables, graphs=graphs, edges=edges))
    assert not is_wrong(naive, "decode:256")
    assert _ordered(tables, "decode:256") < _ordered(table_files.load(naive), "decode:256")


def _ordered(tables: Tables, key: str) -> int:
    """Return the number of node pairs that edges order."""
    nodes, edges, _ = tables.graph(tables.keys.index(key))
    reach = np.zeros((len(nodes), len(nodes)), bool)
    reach[edges["source"], edges["target"]] = True
    for middle in range(len(nodes)):
        reach |= reach[:, middle : middle + 1] & reach[middle]
    return int(reach.sum())


# --- kernels and refusals ---


def test_naive_loading_again_makes_a_second_copy() -> None:
    image = cubin({"k": ("scale", ROUTINES["scale"].layout)}, globals_=("counter",))
    extra = (*libraries(), Library("stateful", image, exported=False))
    model = SimModel(SMALL, 2, driver=SimDriver(2, extra))
    own = model.driver.function("stateful", "k")
    forgetful = replace(model.driver.kernel(own), mutable_globals=False)
    assert Ladder(model.driver, model, model.driver.binary).resolve(forgetful) != own


def _launch(driver: SimDriver, routine: str, *values: object) -> None:
    function = driver.function(
        "framework" if routine == "add" else "twin", "fw_add" if routine == "add" else "twin"
    )
    driver.submit(Node(NodeKind.KERNEL, ROUTINES[routine].fields.pack(*values), function))


@pytest.mark.parametrize("kind", [NodeKind.HOST, NodeKind.ALLOC, NodeKind.FREE, NodeKind.CHILD])
def test_naive_dropping_an_unsupported_node_drops_its_order(kind: NodeKind) -> None:
    """first -> node -> second: without the node no edge orders `second` after `first`."""
    driver = SimDriver(3, libraries())
    x, y, z = (driver.allocate(512) for _ in range(3))
    driver.begin_capture()
    _launch(driver, "scale", x, y, 1)
    driver.submit(Node(kind))
    _launch(driver, "scale", y, z, 1)
    graph = driver.end_capture()
    first, dropped, second = driver.nodes(graph)
    kept = [edge for edge in driver.edges(graph) if dropped not in (edge.source, edge.target)]
    assert (first, second) not in {(edge.source, edge.target) for edge in kept} and not kept


def test_naive_replay_of_a_captured_offset_repeats_itself() -> None:
    """A generator's offset is a constant of the graph: eager runs draw new numbers, a replay repeats them."""
    driver = SimDriver(4, libraries())
    x, out = driver.allocate(512), driver.allocate(512)
    values = driver.memory.array(x, np.float32, 4)
    values[:] = 1

    def drawn(run: object) -> bytes:
        driver.fill(out, 16, 0)
        run()  # type: ignore[operator]
        return driver.read(out, 16)

    driver.begin_capture()
    _launch(driver, "add", x, out, 4, 512)
    executable = driver.instantiate(driver.end_capture())
    replays = {drawn(lambda: driver.launch(executable, 0)) for _ in range(3)}
    eager = {drawn(lambda o=offset: _launch(driver, "add", x, out, 4, o)) for offset in (512, 1024, 1536)}
    assert len(replays) == 1 and len(eager) == 3


def test_naive_adopted_memory_of_a_peer_is_a_private_copy() -> None:
    """A collective's buffer is shared with another rank; adopting it as a library's workspace separates them."""
    driver = SimDriver(5, libraries())
    shared = driver.allocate(512)
    driver.fill(shared, 512, 7)
    adopted = driver.allocate(512)
    driver.write(adopted, driver.read(shared, 512))
    driver.fill(shared, 512, 9)  # the peer has written
    assert driver.read(adopted, 512) != driver.read(shared, 512)
    assert any(mark in "ncclDevKernel_AllReduce_Sum_bf16" for mark in capture.COLLECTIVES)
