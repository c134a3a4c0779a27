"""The waits of the package, each with a run that shows that it is needed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning_pipesync
from tests.streams.streams import CALLS, Wait
from tests.streams.trainings import (
    Training,
    copy_and_free,
    drop_a_handle,
    free_a_bucket,
    load_and_train,
    receive_ahead,
    receive_from_own_server,
    train,
)

SMALL_BUCKETS = {"bucket_mb": 1e-3}
DEAR = Training("dear", SMALL_BUCKETS)
SERVERS = Training("parameter_server", {"policy": "sync"})
#: A server copies the weights as soon as it starts.
DC_ASGD = Training("parameter_server", {"policy": "k_async", "delay_compensation": "dc_asgd"})
#: Its learners push, and wait for nothing.
DOWNPOUR = Training("parameter_server", {"policy": "downpour", "n_push": 1, "n_fetch": 100}, flushes=False)

#: By the wait, a run that is not in order without it, on some rank.
MUTATIONS: dict[Wait, tuple[Callable[..., None], tuple[Any, ...]]] = {
    Wait("wait_event", "comm_queue.py", "start_after_the_caller"): (train, (DEAR,)),
    Wait("wait_event", "comm_queue.py", "wait"): (train, (DEAR,)),
    Wait("wait_stream", "comm_queue.py", "close"): (train, (Training("dear", SMALL_BUCKETS, fails_in="forward"),)),
    Wait("wait_stream", "nccl.py", "_enqueue"): (train, (DEAR,)),
    Wait("wait_event", "nccl.py", "wait"): (train, (DEAR,)),
    Wait("record_stream", "nccl.py", "_enqueue"): (drop_a_handle, ()),
    Wait("wait_stream", "buckets.py", "release_memory"): (free_a_bucket, ()),
    Wait("wait_stream", "backpipe.py", "_reduce"): (train, (Training("dear", stream_per_layer=True),)),
    Wait("record_stream", "channel.py", "receive"): (receive_ahead, ()),
    Wait("wait_stream", "wire.py", "start"): (train, (SERVERS,)),
    Wait("record_stream", "wire.py", "start"): (copy_and_free, ()),
    Wait("synchronize", "wire.py", "wait"): (train, (SERVERS,)),
    Wait("synchronize", "mail.py", "deliver"): (train, (SERVERS,)),
    Wait("wait_stream", "server.py", "__init__"): (train, (DC_ASGD,)),
    Wait("wait_event", "server.py", "reload"): (load_and_train, ({"policy": "sync"},)),
    Wait("wait_stream", "server.py", "close"): (train, (DOWNPOUR,)),
    Wait("record_stream", "server.py", "_follow"): (train, (DOWNPOUR,)),
    Wait("record_stream", "shards.py", "receive"): (receive_from_own_server, ()),
    Wait("synchronize", "parameters.py", "item"): (train, (Training("selsync", {"delta": 0.01}),)),
    Wait("synchronize", "clock.py", "seconds_between"): (train, (DEAR,)),
}


def waits_in_package() -> Iterator[Wait]:
    """Yields the places where the package orders streams, or keeps memory for one.

    Not ``torch.cuda.synchronize``, which waits for the whole device, nor the methods' own ``synchronize``.
    """
    root = Path(lightning_pipesync.__file__).parent
    for path in root.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for node in _own_nodes(function):
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS:
                        of_event = node.func.attr != "synchronize" or path.is_relative_to(root / "core")
                        if of_event and ast.unparse(node.func) != "torch.cuda.synchronize":
                            yield Wait(node.func.attr, path.name, function.name)


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yields the nodes of a function without those of functions within it."""
    nodes: list[ast.AST] = [*function.body]
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, ast.FunctionDef):
            nodes.extend(ast.iter_child_nodes(node))
