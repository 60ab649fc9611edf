"""Functions that the tests call in a process of their own."""

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path


def add(one, other):
    return {"sum": one + other}


def fail():
    raise ValueError("no such amount")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def learn(file, epochs):
    losses = []
    for epoch in range(epochs):
        losses.append(f"{0.99 - epoch / 100:.2f}")
        Path(file).write_text(" ".join(losses))
        time.sleep(0.05)
    return epochs


def fork_a_worker(number):
    with multiprocessing.get_context("fork").Pool(1) as pool:  # as a PyDataset with use_multiprocessing does
        return pool.map(abs, [number])


def terminate():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        print(tempfile.mkdtemp())
