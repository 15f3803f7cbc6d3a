import os
import socket
import threading

import pytest
import torch

from lit_asyncrl.generation.transport import Connection, SharedTensors, create_memfd, layout_of


def test_tensors_written_through_one_mapping_are_read_through_another():
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1.5], dtype=torch.bfloat16), "c": torch.arange(3)}
    layout, size = layout_of(weights)
    memfd = create_memfd()
    os.ftruncate(memfd, size)
    SharedTensors(memfd, layout, size).write(weights)
    read = SharedTensors(memfd, layout, size).tensors
    os.close(memfd)
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in weights.items())


def test_messages_larger_than_the_socket_buffer_arrive_whole_and_in_order():
    ours, theirs = (Connection(end) for end in socket.socketpair())
    messages = [list(range(300_000)), "small"]
    sender = threading.Thread(target=lambda: [ours.send(message, 10.0) for message in messages])
    sender.start()
    assert [theirs.receive(10.0), theirs.receive(10.0)] == messages
    sender.join(10.0)


def test_nothing_arrived_is_none_and_a_closed_end_is_end_of_file():
    ours, theirs = (Connection(end) for end in socket.socketpair())
    assert theirs.receive(0.0) is None
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive(1.0)


def test_sending_to_a_process_that_reads_nothing_ends_with_a_timeout():
    ours, _theirs = (Connection(end) for end in socket.socketpair())
    with pytest.raises(TimeoutError):
        ours.send(bytes(10_000_000), 0.05)
