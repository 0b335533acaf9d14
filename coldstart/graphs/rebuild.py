"""One graph built anew in the driver: nodes in their captured order, attributes, edges with their data, instantiation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from coldstart.graphs.api import DriverApi, NodeKind
from coldstart.graphs.link import Rows
from coldstart.graphs.tables import MEMCPY, MEMSET, Array, Tables


@dataclass
class Linked:
    """A bundle in this process: addresses known, contents written, kernels resolved or not."""

    tables: Tables
    base: Array
    rows: Rows
    functions: list[int]
    missing: dict[int, str]
    ambiguous: dict[int, str]


def fill(driver: DriverApi, graph: int, linked: Linked, index: int) -> int:
    """Build graph number `index` of the tables into the empty `graph`; the executable. Raises DriverError."""
    nodes, edges, _ = linked.tables.graph(index)
    first = int(linked.tables.graphs[index]["node"])
    handles = _nodes(driver, graph, nodes, linked.rows.rows[first : first + len(nodes)], linked.rows.payload)
    for number in np.flatnonzero(nodes["attributes"]).tolist():
        driver.set_attributes(handles[number], linked.tables.attributes[nodes[number]["attributes"]])
    driver.add_edges(graph, handles, edges)
    return driver.instantiate(graph)


def _nodes(driver: DriverApi, graph: int, nodes: Array, rows: Array, payload: Array) -> list[Any]:
    """Each run of kernels is one batch."""
    handles: list[Any] = []
    for other in [*np.flatnonzero(nodes["kind"] != NodeKind.KERNEL).tolist(), len(nodes)]:
        if other > len(handles):
            handles += driver.add_kernels(graph, rows[len(handles) : other])
        if other < len(nodes):
            handles.append(_other(driver, graph, nodes[other], payload))
    return handles


def _other(driver: DriverApi, graph: int, node: Any, payload: Array) -> Any:
    start = int(node["payload"])
    if node["kind"] == NodeKind.MEMSET:
        return driver.add_memset(graph, payload[start : start + MEMSET.itemsize].view(MEMSET)[0])
    if node["kind"] == NodeKind.MEMCPY:
        return driver.add_memcpy(graph, payload[start : start + MEMCPY.itemsize].view(MEMCPY)[0])
    return driver.add_empty(graph)
