"""A stream needs the memory of its buffers, however long it is."""

import json

import pytest

CODE = """
import json
from pathlib import Path
import tensorflow as tf
from tfopt.data import Examples, pipeline

MIB = 2**20
BUFFER, BATCH, PREFETCH = 128, 16, 2

def decode(number):
    return tf.fill([MIB // 4], tf.cast(number, tf.float32)), number

def examples(count):
    records = tf.data.Dataset.range(count).map(lambda number: decode(number)[0])
    return Examples(name="stream", train=records, test=records, outputs=1, decode=lambda row: (row, row[0]))

# The figures of this process alone: ru_maxrss would begin at the memory of the process that started it.
def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

def read(count):
    settings = dict(cache="off", shuffle_buffer=BUFFER, prefetch=PREFETCH)
    return sum(len(y) for x, y in pipeline(examples(count), batch_size=BATCH, **settings))

read(1)
before = resident("VmRSS:")
buffers = (BUFFER + BATCH * (PREFETCH + 2)) * MIB
count = 4 * buffers // MIB
seen = read(count)
peak = resident("VmHWM:")
print(json.dumps({"seen": seen, "count": count, "taken": peak - before, "buffers": buffers}))
"""


@pytest.mark.slow
def test_a_stream_of_four_times_the_buffers_takes_their_memory_and_little_more(fresh_python):
    done = fresh_python("-c", CODE, imported="nothing", check=True)  # whose memory is its own
    found = json.loads(done.stdout)
    assert found["seen"] == found["count"] == 4 * found["buffers"] // 2**20
    assert found["taken"] < found["buffers"] + 300 * 2**20, found
