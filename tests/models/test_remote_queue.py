# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A reader of another machine's queue stops waiting when the queue is shut down."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue


@pytest.fixture
def threads():
    with ThreadPoolExecutor() as threads:
        yield threads


@pytest.fixture
def queues(threads):
    """A writer, and its reader over TCP, as if on another machine."""
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    for ready in [threads.submit(queue.wait_until_ready) for queue in (writer, reader)]:
        ready.result(timeout=30)
    return writer, reader


def test_messages_arrive_in_order(queues):
    writer, reader = queues
    for message in "first", {"second": 2}:
        writer.enqueue(message)
    assert reader.dequeue() == "first"
    assert reader.dequeue(timeout=5) == {"second": 2}


def test_a_message_ends_the_wait_at_once(queues, threads):
    writer, reader = queues
    waiting = threads.submit(reader.dequeue)
    time.sleep(1.5)  # past the first look
    sent = time.monotonic()
    writer.enqueue("late")
    assert waiting.result(timeout=5) == "late"
    assert time.monotonic() - sent < 0.5


@pytest.mark.parametrize("timeout", [0, 0.2, 1.2])
def test_a_timeout_is_kept(queues, timeout):
    _, reader = queues
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=timeout)
    assert timeout - 0.01 <= time.monotonic() - start < timeout + 0.5


@pytest.mark.parametrize("timeout", [None, 60])
def test_a_shutdown_ends_the_wait(queues, threads, timeout):
    _, reader = queues
    waiting = threads.submit(reader.dequeue, timeout)
    time.sleep(0.2)
    reader.shutdown()
    with pytest.raises(RuntimeError, match="cancelled"):
        waiting.result(timeout=3)
