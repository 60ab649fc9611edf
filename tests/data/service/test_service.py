"""A tf.data service gives the same examples as no service, and says what a killed worker has lost."""

import os
import signal
import socket
import subprocess
import sys

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from rich.console import Console

from tfopt.compat.listening import listen_only_on
from tfopt.data import DataConfig, EpochCounter, Examples, measure, pipeline
from tfopt.data.service import client
from tfopt.data.service.serve import STOPS, _Stop, _stop, serve
from tfopt.errors import ConfigError
from tfopt.recipe import ModelConfig, Recipe
from tfopt.runner import run
from tfopt.signals import on_signals
from tfopt.training import TrainingConfig, compile, plan

COUNT = 3000


def slow(number):
    work = tf.reduce_sum(tf.linalg.matmul(*2 * [tf.ones([100, 100]) * tf.cast(number, tf.float32)]))
    return tf.fill([4], tf.cast(number, tf.float32) + 0 * work), number


def examples(count=COUNT):
    records = tf.data.Dataset.range(count)
    return Examples(name="numbers", train=records, test=records.take(10), outputs=2, decode=slow)


def noisy(example, seed):
    inputs, *others = example
    return inputs + tf.random.stateless_uniform([tf.shape(inputs)[0], 1], seed), *others


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def listening_at(port, processes=None):
    """Returns the addresses on which processes listen at a port; without processes, on which this one does."""
    found = [each for process in processes or [psutil.Process()] for each in process.net_connections()]
    return [each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == port]


@pytest.fixture(scope="module")
def service():
    port = free_port()
    command = [sys.executable, "-m", "tfopt.cli", "data", "serve", "--workers", "2", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == f"tf.data service with 2 workers at grpc://localhost:{port}\n"
        yield process, f"grpc://localhost:{port}"
    finally:
        process.terminate()
        assert process.wait(300) == 0  # SIGTERM ends it cleanly
        assert process.stdout.read().endswith("tf.data service: ended\n")
        assert not psutil.pid_exists(process.pid)


def workers(process):
    return [each for each in psutil.Process(process.pid).children() if "tfopt.data.service.serve" in each.cmdline()]


def seconds(worker):
    return sum(worker.cpu_times()[:2])


def numbers(batches):
    return [int(number) for _, targets in batches for number in targets]


def test_a_server_of_tensorflow_listens_on_one_address_only():
    """A canary too: gRPC must wait with epoll, and its socket must be found."""
    service = tf.data.experimental.service
    port = free_port()
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=port))
    assert listening_at(port) == ["::"]
    assert listen_only_on("127.0.0.1", port)
    assert listening_at(port) == ["127.0.0.1"]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=f"localhost:{port}"))
    numbers = tf.data.Dataset.range(10).apply(service.distribute("distributed_epoch", f"grpc://localhost:{port}"))
    assert sorted(map(int, numbers)) == list(range(10))  # and it answers there
    del worker, dispatcher
    assert listening_at(port) == []


def test_a_second_signal_does_not_break_off_the_end_of_the_workers():
    before = signal.getsignal(signal.SIGINT)
    with on_signals(STOPS, _stop):
        with pytest.raises(_Stop):
            os.kill(os.getpid(), signal.SIGINT)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match=r"host must be a name or an address of this machine. Received: host='192\."):
        serve(workers=1, port=free_port(), host="192.0.2.77")


@pytest.mark.slow
def test_the_service_listens_on_the_loopback_address_only(service):
    process, address = service
    first = int(address.rpartition(":")[2])
    processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
    found = {port: listening_at(port, processes) for port in range(first, first + 3)}
    assert list(found.values()) == 3 * [["127.0.0.1"]]


@pytest.mark.slow
def test_the_examples_are_those_without_a_service(service):
    counter = EpochCounter()
    batches = pipeline(examples(), batch_size=64, service=service[1], epoch=counter, augment=noisy)
    assert len(batches) == 47
    orders, noises = [], []
    for epoch in range(2):
        counter.assign(epoch)
        taken = list(batches)
        assert [len(targets) for _, targets in taken] == [64] * 46 + [56]
        orders.append(numbers(taken))
        noises.append(np.concatenate([x[:, 0] - tf.cast(y, tf.float32) for x, y in taken]))
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(COUNT))
    assert orders[0] != orders[1]
    assert all(len(set(each.round(4).tolist())) > 100 for each in noises)
    assert not np.array_equal(*noises)


@pytest.mark.slow
def test_a_worker_that_waits_for_its_dispatcher_ends_with_its_parent():
    worker = [sys.executable, "-m", "tfopt.data.service.serve", *(f"localhost:{free_port()}" for _ in range(2))]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0"}
    parent = subprocess.Popen(
        ["sh", "-c", '"$0" "$@" $$ & wait', *worker], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert any("Will retry" in line for line in parent.stderr)
        (worker,) = workers(parent)
    finally:
        parent.kill()
    _, left = psutil.wait_procs([worker], timeout=30)
    assert not left
    parent.communicate()


@pytest.mark.slow
def test_a_killed_worker_ends_the_epoch_with_what_is_lost_and_the_next_epoch_is_whole(service):
    process, address = service
    count = 20_000  # far more batches than the buffers hold: a worker with records has not sent all when it is killed
    counter = EpochCounter()
    batches = pipeline(examples(count), batch_size=16, service=address, epoch=counter)
    counter.assign(0)
    seen = []
    before = {worker: seconds(worker) for worker in workers(process)}

    def read():
        for number, (_, targets) in enumerate(batches):
            seen.extend(targets.numpy().tolist())
            if number == 3:  # on a busy machine one worker may get its task so late that the other has all records
                busier = max(before, key=lambda worker: seconds(worker) - before[worker])
                os.kill(busier.pid, signal.SIGKILL)

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"lost [\d,]+ of 20,000 examples of this epoch") as caught:
        read()
    assert len(set(seen)) == len(seen)
    assert f"lost {count - len(seen):,} of" in str(caught.value)
    counter.assign(1)
    assert sorted(numbers(batches)) == list(range(count))
    assert len(workers(process)) == 2


@pytest.mark.slow
def test_a_model_trains_from_a_service(service):
    decided = plan(TrainingConfig(global_batch_size=64, strategy="none", precision="float32"))
    with decided.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    compile(model, decided, loss="mse")
    history = model.fit(decided.pipeline(examples(), service=service[1]), epochs=2, verbose=0).history
    assert len(history["loss"]) == 2


def through(data, **settings):
    return pipeline(data, batch_size=8, service="grpc://localhost:1", **settings)


@pytest.mark.parametrize(
    ("settings", "padding", "steps"),
    [({}, None, 3), ({"drop_remainder": True}, None, -2), ({}, (0, 0), -2)],
    ids=["joined", "drop_remainder", "padded"],
)
def test_the_number_of_steps_is_that_of_the_batches_or_unknown(settings, padding, steps):
    """Keras' `fit` ends an epoch after the number that it is told."""
    records = tf.data.Dataset.range(20)
    source = Examples(
        name="numbers",
        train=records,
        test=records,
        outputs=2,
        decode=lambda number: (tf.fill([number % 3 + 1 if padding else 4], number), number),
        padding=padding,
    )
    assert int(through(source, **settings).cardinality()) == steps


def python(number):
    return tf.numpy_function(abs, [number], tf.int64)


@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        (tf.data.Dataset.range(9).map(python), {}, r"the stage 'map python', which calls Python"),
        (tf.data.Dataset.range(9).repeat(), {}, r"needs records with an end"),
        ((np.zeros((2**15, 1100), "float64"), np.zeros(2**15)), {}, r"below 256\.0 MiB\. Received: 2\d\d\.\d MiB"),
        (tf.data.Dataset.range(9), {"cache": "memory"}, r"cache='memory', but each worker reads other records"),
        (tf.data.Dataset.range(9), {"repeat": True}, r"repeat=True, but its workers share the records of one epoch"),
    ],
    ids=["python", "endless", "large", "cache", "repeat"],
)
def test_what_a_service_cannot_do_is_refused_before_the_training(data, settings, words):
    with pytest.raises(ConfigError, match=words):
        through(data, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "mirrored"}, r"trains on one device\. Received: strategy=MirroredStrategy"),
        ({"checkpoint_dir": "x", "checkpoint_every": 5}, r"resumes only between epochs.* checkpoint_every=5"),
    ],
)
def test_a_plan_that_needs_the_order_is_refused(settings, words):
    decided = plan(TrainingConfig(**{"strategy": "none", **settings}))
    with pytest.raises(ConfigError, match=words):
        decided.pipeline(examples(), service="grpc://localhost:1")


def test_an_address_where_nothing_listens_is_an_error_and_no_endless_wait(monkeypatch):
    monkeypatch.setattr(client, "SECONDS_TO_REACH", 0.0)
    with pytest.raises(ConfigError, match=r"must listen at its address. Received: service='grpc://localhost:"):
        next(iter(through(tf.data.Dataset.range(9))))


def test_a_data_set_made_of_one_through_a_service_says_why_it_fails():
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not know the number of its epoch"):
        list(through(tf.data.Dataset.range(9)).map(lambda number: number))


@pytest.mark.slow
def test_a_recipe_trains_from_a_service_and_exports(service, tmp_path):
    data = DataConfig(source="digits", arguments={"image_size": 8}, service=service[1])
    training = TrainingConfig(epochs=1)
    recipe = Recipe(name="s", model=ModelConfig(builder="mlp"), data=data, training=training, export_dir=str(tmp_path))
    result = run(recipe, console=Console(quiet=True))
    assert result.ok
    assert result.report.input is None  # the stages run in the workers


@pytest.mark.slow
def test_what_runs_elsewhere_is_not_measured_here(service):
    with pytest.raises(ConfigError, match=r"needs a pipeline of this process.*tf.data service"):
        measure(pipeline(examples(), batch_size=64, service=service[1]))
