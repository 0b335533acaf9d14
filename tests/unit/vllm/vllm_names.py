"""Attribute names outside vLLM: ours, and those of the libraries that the package uses."""

from __future__ import annotations

import argparse
import ast
import asyncio
import atexit
import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import enum
import functools
import gc
import http.client
import importlib
import importlib.machinery
import inspect
import itertools
import json
import logging
import math
import mmap
import os
import pathlib
import random
import re
import runpy
import selectors
import shutil
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
import traceback
import types
from pathlib import Path

_KINDS = (
    ssl,
    dataclasses,
    enum,
    str, bytes, dict, list, set, frozenset, tuple, int, float, memoryview, object, BaseException,
    OSError, SystemExit, types.FunctionType, types.ModuleType, pathlib.Path, socket.socket,
    threading.Thread, argparse.ArgumentParser, concurrent.futures.Future,
    concurrent.futures.ThreadPoolExecutor, asyncio.AbstractEventLoop, asyncio.Event,
    selectors.DefaultSelector, selectors.SelectorKey,
    random.Random, logging.root, importlib.machinery.ModuleSpec, importlib.machinery.SourceFileLoader,
    http.client.HTTPConnection, http.client.HTTPResponse, contextlib.ExitStack, os.stat_result,
    re.Pattern, itertools.chain, collections.deque, argparse, ast, asyncio, concurrent.futures, contextlib, ctypes,
    functools, gc, importlib, inspect, json, logging, mmap, os, random, runpy, selectors, shutil,
    signal, socket, sys, tempfile, threading, time, math, atexit, traceback,
)  # fmt: skip
# Of torch, numpy, uvicorn, prometheus_client and tqdm, which need not be installed where this runs.
_WORDS = """
    __dataclass_fields__ __wrapped__ _storage_Use_Count _unpickle_nested_function
    CUDAGraph Config Event Module MultiProcessValue Parameter Stream Tensor UntypedStorage ValueClass _C
    _buffers _cdata _init_logs _parameters _record_memory_history aten bfloat16 bool clone code code_ compiler content
    copy_ cuda current_stream data data_ptr default device disable_guard_check dtype element_size empty
    exec_module float16 float32 float64 float8_e4m3fn float8_e5m2 float8_e8m0fnu forward from_buffer
    frombuffer get_hash get_num_threads get_path id inlined_sources int16 int32 int64 int8 is_contiguous is_cuda
    is_floating_point is_inference is_inference_mode_enabled is_view labels layout load load_compiled_function
    loader memory module modules monitor_interval name named_buffers named_modules named_parameters nbytes nn
    numel ops parameters pin_memory prod random record_event record_stream save_compiled_function seed set
    set_ set_num_threads shape size source_info start storage_offset stream stride strided to to_dict tolist
    type uint16 uint32 uint64 uint8 untyped_storage values view wait_event zeros
"""


@functools.cache
def known_elsewhere() -> frozenset[str]:
    """Return attribute names of the standard library and of the libraries named above."""
    return frozenset(_WORDS.split()).union(*(dir(kind) for kind in _KINDS))


@functools.cache
def own_names(root: Path) -> frozenset[str]:
    """Return the names that coldstart defines: functions, classes, fields, and module-level names."""
    found: set[str] = set()
    for package in ("coldstart", "artifacts"):
        for path in (root / package).rglob("*.py"):
            found |= set(_defined(ast.parse(path.read_bytes())))
    return frozenset(found)


def _defined(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(node.name)
        if isinstance(node, ast.ClassDef):
            stated = [target for one in node.body if isinstance(one, ast.Assign) for target in one.targets]
            found += [target.id for target in stated if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign):
            found += [node.target.id] if isinstance(node.target, ast.Name) else _targets(node.target)
        elif isinstance(node, ast.Assign):
            found += [name for target in node.targets for part in ast.walk(target) for name in _targets(part)]
    top = [node for node in tree.body if isinstance(node, ast.Assign)]
    return found + [part.id for node in top for part in ast.walk(node) if isinstance(part, ast.Name)]


def _targets(target: ast.AST) -> list[str]:
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
        return [target.attr]
    return []
