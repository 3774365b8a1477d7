"""KV cache events over ZeroMQ for prefix-aware routers, in the schema of `vllm.distributed.kv_events` (vLLM 0.33).

A message is (topic, sequence number, batch). The number has 8 bytes, big-endian; the batch is a msgpack array of a time
and the events. A request to the replay socket contains the first number to send. An empty batch with number -1 ends the
replay.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from paged.cache.events import BlockRemoved, BlocksStored, CacheEvent
from paged.cache.manager import PagedKvCacheManager
from paged.cache.tiers.host_events import HostBlockRemoved, HostBlockStored
from paged.errors import InvalidInputError

_END = (-1).to_bytes(8, "big", signed=True)
_POLL_S = 0.05  # interval of checks of the replay socket


class KvEventPublisher:
    """Publishes the events of a cache from a thread. Events that arrive while it sends form one batch.

    Hashes are the cache's own; a router hashes the token ids itself. A subscriber more than `max_messages` behind loses
    messages, detects this by the numbers, and asks the replay socket.

    Args:
        manager: the cache, before its first request, because blocks that it already holds are not published.
        endpoint: address to bind, such as "tcp://127.0.0.1:5557".
        replay_endpoint: address of the replay socket, or None.
        max_messages: number of batches to keep for replays and for each slow subscriber.

    Raises:
        InvalidInputError: an address cannot be bound.
    """

    def __init__(
        self,
        manager: PagedKvCacheManager,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        max_messages: int = 10_000,
    ) -> None:
        self._topic, self._block_size = topic.encode(), manager.config.block_size
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=max_messages)
        self._stored: set[int | bytes] = set()
        self._events: queue.SimpleQueue[CacheEvent | None] = queue.SimpleQueue()
        context: Any = zmq.Context.instance()
        self._pub, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._pub.set_hwm(max_messages)
        self._replay.setsockopt(zmq.SNDHWM, 2 * (max_messages + 1))  # room for a whole replay and its end
        try:
            self._pub.bind(endpoint)
            if replay_endpoint is not None:
                self._replay.bind(replay_endpoint)
        except zmq.ZMQError as error:
            raise InvalidInputError(f"endpoint: {endpoint!r}, {replay_endpoint!r}: cannot be bound: {error}") from error
        self._thread = threading.Thread(target=self._run, name="paged-kv-events", daemon=True)
        self._thread.start()
        manager.subscribe(self._events.put, with_host=True)

    def close(self) -> None:
        """Send queued events and close the sockets."""
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        number, is_open = 0, True
        while is_open:
            if self._replay.poll(0):
                self._answer()
            events: list[CacheEvent | None] = []
            with contextlib.suppress(queue.Empty):
                events.append(self._events.get(timeout=_POLL_S))
                while True:
                    events.append(self._events.get_nowait())
            is_open = None not in events
            maps = [self._as_map(event) for event in events if event is not None]
            if maps:
                message = number.to_bytes(8, "big"), msgspec.msgpack.encode([time.time(), maps, 0])
                self._sent.append(message)
                self._pub.send_multipart((self._topic, *message))
                number += 1
        self._pub.close(linger=1000)
        self._replay.close(linger=1000)

    def _answer(self) -> None:
        client, *_, first = self._replay.recv_multipart()
        for number, batch in self._sent:
            if number >= first:  # bytes of equal length compare like numbers
                self._replay.send_multipart((client, b"", self._topic, number, batch))
        self._replay.send_multipart((client, b"", b"", _END, b""))

    def _as_map(self, event: CacheEvent) -> dict[str, Any]:
        if isinstance(event, HostBlockRemoved):
            return {"type": "BlockRemoved", "block_hashes": [event.hash], "medium": "CPU"}
        if isinstance(event, HostBlockStored):
            return {
                "type": "BlockStored",
                "block_hashes": [event.hash],
                "parent_block_hash": None,
                "token_ids": [],  # empty, as in vLLM's offloading connector: the device's event contained them
                "block_size": self._block_size,
                "lora_id": None,
                "medium": "CPU",
            }
        if isinstance(event, BlockRemoved):
            self._stored.discard(event.hash)
            return {"type": "BlockRemoved", "block_hashes": [event.hash], "medium": "GPU"}
        if not isinstance(event, BlocksStored):
            self._stored.clear()
            return {"type": "AllBlocksCleared"}
        parent = None
        if event.parent_hash in self._stored:  # otherwise the parent hash stands for the namespace
            parent = event.parent_hash
        self._stored.update(event.hashes)
        adapter, salt = event.namespace, None
        if isinstance(event.namespace, tuple):
            adapter, salt = event.namespace
        extra_keys: list[tuple[Any, ...] | None] = []
        for index in range(len(event.hashes)):
            block_keys = [adapter] if adapter else []
            if salt and parent is None and index == 0:  # only the first block of a sequence carries the salt
                block_keys.append(salt)
            extra_keys.append(tuple(block_keys) or None)
        return {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": parent,
            "token_ids": event.token_ids,
            "block_size": self._block_size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": adapter,
            "extra_keys": extra_keys,
        }
