"""Flags of `bench`, named as llama-bench names them, and of `bench attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .make import JobThreads
from .output import Json
from .spread import plain

TESTS = "Tests"

Repetitions = Annotated[
    int, plain(TESTS, "Repetitions of each test; medians are shown.", "-r", "--repetitions", least=1, most=10_000)
]


@dataclass(frozen=True)
class BenchFlags:
    """The tests of `bench` and their table."""

    n_prompt: Annotated[
        str, plain(TESTS, "Prompt tokens of the prefill tests, separated by commas; 0: none.", "-p", "--n-prompt")
    ] = "512"
    n_gen: Annotated[
        str, plain(TESTS, "Tokens of the decode tests, separated by commas; 0: none.", "-n", "--n-gen")
    ] = "128"
    n_depth: Annotated[
        str, plain(TESTS, "Tokens in the context before each test, separated by commas.", "-d", "--n-depth")
    ] = "0"
    repetitions: Repetitions = 5
    output: Annotated[str, plain(TESTS, "Format on stdout.", "-o", "--output", metavar="md|json|jsonl|csv")] = "md"
    json: Json = False


@dataclass(frozen=True)
class AttentionBenchFlags:
    """The shapes that `bench attention` measures."""

    types: Annotated[str, plain(TESTS, "KV cache types, separated by commas; K/V for unequal ones.", "--types")] = (
        "f16,q8_0,q4_0"
    )
    cells: Annotated[str, plain(TESTS, "Tokens in the KV cache, separated by commas.", "--cells")] = "2048,8192,32768"
    heads: Annotated[int, plain(TESTS, "Query heads.", "--heads", least=1, most=4096)] = 32
    kv_heads: Annotated[int, plain(TESTS, "Heads of K and V.", "--kv-heads", least=1, most=4096)] = 8
    head_size: Annotated[int, plain(TESTS, "Values in a head.", "--head-size", least=1, most=4096)] = 128
    tokens: Annotated[
        int, plain(TESTS, "Query tokens: 1 is decode, many are prefill.", "--tokens", least=1, most=1 << 20)
    ] = 1
    threads: JobThreads = 0
    repetitions: Repetitions = 5
    json: Json = False
